"""Reads sharded checkpoints in any layout, and verifies checksums."""

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dovetail.checkpoint.manifest import TRAINING, Manifest, StoredFile
from dovetail.errors import CheckpointError, DamagedError, listing
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices
from dovetail.weights.atomic import file_blocks
from dovetail.weights.hf_reader import HFReader, StoredRegion, TensorSource
from dovetail.weights.parallel_read import run_jobs
from dovetail.weights.safe_paths import MANIFEST, contained
from dovetail.weights.safetensors import TensorFile

CPU = torch.device("cpu")


class ShardedReader(TensorSource):
    """`names` omits training state, which can be read. `verify_checksums` checks the data."""

    has_checksums = True

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.path = path
        what = str(path / MANIFEST)
        self.manifest = Manifest.parse(contained(path, MANIFEST).read_bytes(), what)
        files = {name: self._open(name, stored) for name, stored in self.manifest.pieces.items()}
        super().__init__(path, files, self.manifest.tensors)
        self.names = {name: None for name in self.tensors if not name.startswith(TRAINING)}.keys()
        self._crcs: dict[StoredRegion, int] = {}
        self._problems: dict[StoredRegion, str] = {}
        self._verified: set[StoredRegion] = set()
        for name, tensor in self.tensors.items():
            for region in tensor.regions:
                entry = files[region.file].entries.get(region.key)
                if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, region.shape):
                    raise CheckpointError(
                        f"{path / region.file} does not hold {name} as {what} says: {region.slices}"
                    )

    def _open(self, name: str, stored: StoredFile) -> TensorFile:
        try:
            path = contained(self.path, name)
            if path.stat().st_size != stored.size:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size} bytes, but the manifest says {stored.size}"
                )
            file = TensorFile(path)
            if zlib.crc32(file.header) != stored.crc32:
                raise CheckpointError(
                    f"{path}: its header does not match its checksum; it was changed since"
                )
        except (CheckpointError, OSError) as error:
            lost = [
                tensor
                for tensor, t in self.manifest.tensors.items()
                if any(r.file == name for r in t.regions)
            ]
            raise CheckpointError(
                f"{error}; lost with it are parts of:\n{listing(lost)}"
            ) from error
        return file

    def training_state(self, start: str, others: Collection[str] = ()) -> "ShardedReader":
        """The tensors named `start` + name, under that name, and `others`."""
        view = copy(self)
        view.path = self.path / start
        view.tensors = {name: self.tensors[name] for name in others}
        view.tensors |= {
            n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)
        }
        view.names = view.tensors.keys()
        return view

    def _fill(self, region: StoredRegion, part: Slices, out: Tensor, buffer: Tensor) -> None:
        whole = tuple(out.shape) == region.shape
        with self._problem_noted(region):
            crc = self._files[region.file].fill(region.key, part, out, buffer, checksum=whole)
            if whole:
                self._crcs[region] = crc

    def verify_checksums(self, mesh: Mesh, *, training: bool = False) -> None:
        """Compare the model's checksums, or all, reading what no rank has read. DamagedError on every rank. Collective."""
        world = mesh["world"]
        names = self.manifest.tensors if training else self.names
        pieces = [
            (name, region) for name in names for region in self.manifest.tensors[name].regions
        ]
        pieces = [piece for piece in pieces if piece[1] not in self._verified]
        marks = "".join("01"[region in self._crcs] for _, region in pieces)
        unread = [
            region
            for (_, region), *read in zip(pieces, *of_all(marks, mesh), strict=True)
            if "1" not in read
        ]
        sides = list(self.manifest.sides) if pieces else []
        try:
            with agreed(mesh):
                run_jobs(
                    [partial(self._sum, region) for region in unread[world.rank :: world.size]], CPU
                )
                problems = list(self._problems.values())
                problems += [
                    f"{region.file}: {name} {region.slices} does not match its checksum"
                    for name, region in pieces
                    if region not in self._problems
                    and self._crcs.get(region, region.crc32) != region.crc32
                ]
                damaged = filter(self._is_damaged, sides[world.rank :: world.size])
                problems += [f"{name} does not match its checksum" for name in damaged]
                if problems:
                    text = listing(list(dict.fromkeys(problems)))
                    raise CheckpointError(
                        f"{self.path} is damaged; use an older checkpoint or another copy:\n{text}"
                    )
        except CheckpointError as error:
            raise DamagedError(str(error), self.path) from error
        self._verified |= {region for _, region in pieces}
        self._crcs.clear()

    def verify(self) -> None:
        self.verify_checksums(Mesh.solo(), training=True)

    def _sum(self, region: StoredRegion, buffer: Tensor) -> None:
        with self._problem_noted(region):
            self._crcs[region] = self._files[region.file].checksum(region.key, buffer)

    @contextmanager
    def _problem_noted(self, region: StoredRegion) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._problems[region] = f"{region.file}: {region.key} {region.slices}: {error}"

    def _is_damaged(self, side: str) -> bool:
        stored = self.manifest.sides[side]
        size = 0
        crc = 0
        for block in file_blocks(contained(self.path, side)):
            size = size + len(block)
            crc = zlib.crc32(block, crc)
        return (size, crc) != (stored.size, stored.crc32)


def open_checkpoint(path: Path | str, mesh: Mesh) -> TensorSource:
    """Call `verify_checksums` before using what was read. Collective."""
    with agreed(mesh):
        return ShardedReader(path) if (Path(path) / MANIFEST).exists() else HFReader(path)
