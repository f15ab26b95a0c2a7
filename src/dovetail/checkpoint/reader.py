"""Reads a sharded checkpoint under any layout: a slice is put together from whichever pieces hold parts of it."""

import zlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from dovetail.checkpoint.manifest import TRAINING, Manifest, StoredFile, StoredRegion
from dovetail.errors import CheckpointError, listing
from dovetail.mesh import Mesh
from dovetail.placement import Slices, as_index, overlap, within
from dovetail.weights.agree import agreed
from dovetail.weights.directory import MANIFEST, contained
from dovetail.weights.files import CHUNK, TensorFile
from dovetail.weights.reader import CheckpointReader, TensorSource

READERS = 8  # threads that verify checksums; more than cores, since they wait for the disk


class ShardedReader:
    """A sharded checkpoint whose manifest and headers have been checked; `verify` checks the data. Never writes."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        what = str(self.path / MANIFEST)
        self.manifest = Manifest.parse(contained(self.path, MANIFEST).read_bytes(), what)
        self._names = {name: None for name in self.manifest.tensors if not name.startswith(TRAINING)}.keys()
        self._files = {name: self._open(name, stored) for name, stored in self.manifest.pieces.items()}
        for name, tensor in self.manifest.tensors.items():
            for region in tensor.regions:
                entry = self._files[region.file].entries.get(region.key)
                shape = tuple(stop - start for start, stop in region.slices)
                if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, shape):
                    raise CheckpointError(
                        f"{self.path / region.file} does not hold {name} as {what} says: {region.slices}"
                    )

    def _open(self, name: str, stored: StoredFile) -> TensorFile:
        """A file of pieces, or what is wrong with it and which tensors are lost with it."""
        try:
            path = contained(self.path, name)
            if path.stat().st_size != stored.size:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes, but the manifest says {stored.size}")
            file = TensorFile(path)
            if zlib.crc32(file.header) != stored.crc32:
                raise CheckpointError(
                    f"{path}: its header does not match its checksum; it was changed after it was written"
                )
        except (CheckpointError, OSError) as error:
            lost = [tensor for tensor, t in self.manifest.tensors.items() if any(r.file == name for r in t.regions)]
            raise CheckpointError(f"{error}; lost with it are parts of:\n{listing(lost)}") from error
        return file

    @property
    def names(self) -> Collection[str]:
        """The model's tensors. Those of the training state can be read, too, but make no model."""
        return self._names

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self.manifest.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.manifest.tensors[name].dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor, or a rectangle of it, on the CPU in its own dtype."""
        tensor = self.manifest.tensors[name]
        slices = tuple((0, length) for length in tensor.shape) if slices is None else slices
        out = torch.empty([stop - start for start, stop in slices], dtype=tensor.dtype)
        for region in tensor.regions:
            shared = overlap(slices, region.slices)
            if shared is None:
                continue
            piece = self._files[region.file].read(region.key, within(shared, region.slices))
            if shared == slices:
                return piece  # the usual case, without a second copy
            out[as_index(within(shared, slices))] = piece
        return out

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Check the checksums of every `shares`-th region and side file from `share` on; raise naming all that fail."""
        regions = [(name, region) for name, tensor in self.manifest.tensors.items() for region in tensor.regions]
        with ThreadPoolExecutor(READERS) as readers:  # reading and summing both leave the interpreter's lock
            problems = list(readers.map(lambda found: self._damage(*found), regions[share::shares]))
        problems += [self._side_damage(name) for name in list(self.manifest.sides)[share::shares]]
        if any(problems):
            found = listing([problem for problem in problems if problem])
            raise CheckpointError(f"{self.path} is damaged; use an older checkpoint or another copy:\n{found}")

    def _damage(self, name: str, region: StoredRegion) -> str:
        intact = self._files[region.file].crc32(region.key) == region.crc32
        return "" if intact else f"{region.file}: {name} {region.slices} does not match its checksum"

    def _side_damage(self, name: str) -> str:
        stored, path = self.manifest.sides[name], contained(self.path, name)
        size = crc = 0
        with open(path, "rb") as file:
            while block := file.read(CHUNK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return "" if (size, crc) == (stored.size, stored.crc32) else f"{name} does not match its checksum"


def open_checkpoint(path: Path | str, mesh: Mesh) -> TensorSource:
    """A reader of an HF directory, or of a sharded checkpoint whose checksums hold. Collective: all raise, or none.

    The ranks divide the checksums between them, so the data of a sharded checkpoint is read once more than it is used.
    """
    source: TensorSource | None = None
    with agreed(mesh):
        if (Path(path) / MANIFEST).exists():
            sharded = source = ShardedReader(path)
            sharded.verify(mesh["world"].rank, mesh["world"].size)
        else:
            source = CheckpointReader(path)
    assert source is not None
    return source
