"""A reader of sharded checkpoints, in any layout, which verifies checksums."""

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
    """A sharded checkpoint. `names` omits training state, which can be read.

    `verify_checksums` checks the data.
    """

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
                found = None if entry is None else (entry.dtype, entry.shape)
                if found != (tensor.dtype, region.shape):
                    raise CheckpointError(
                        f"{path / region.file} does not hold {name} as {what} says: {region.slices}"
                    )

    def _open(self, name: str, stored: StoredFile) -> TensorFile:
        try:
            path = contained(self.path, name)
            size = path.stat().st_size
            if size != stored.size:
                raise CheckpointError(
                    f"{path} has {size} bytes, but the manifest says {stored.size}"
                )
            file = TensorFile(path)
            if zlib.crc32(file.header) != stored.crc32:
                raise CheckpointError(
                    f"{path}: its header does not match its checksum; it was changed since"
                )
        except (CheckpointError, OSError) as error:
            lost = []
            for tensor, stored_tensor in self.manifest.tensors.items():
                if any(region.file == name for region in stored_tensor.regions):
                    lost.append(tensor)
            problem = f"{error}; lost with it are parts of:\n{listing(lost)}"
            raise CheckpointError(problem) from error
        return file

    def training_state(self, start: str, others: Collection[str] = ()) -> "ShardedReader":
        """Return a reader of the tensors named `start` + name, under that name, and of `others`."""
        tensors = {name: self.tensors[name] for name in others}
        for name, tensor in self.tensors.items():
            if name.startswith(start):
                tensors[name.removeprefix(start)] = tensor
        view = copy(self)
        view.path = self.path / start
        view.tensors = tensors
        view.names = tensors.keys()
        return view

    def _fill(self, region: StoredRegion, part: Slices, out: Tensor, buffer: Tensor) -> None:
        whole = tuple(out.shape) == region.shape
        with self._problem_noted(region):
            crc = self._files[region.file].fill(region.key, part, out, buffer, checksum=whole)
            if whole:
                self._crcs[region] = crc

    def verify_checksums(self, mesh: Mesh, *, training: bool = False) -> None:
        """Compare the checksums of the model's tensors, or of all, reading what no rank has read.

        DamagedError on every rank. Collective.
        """
        world = mesh["world"]
        names: dict[StoredRegion, str] = {}
        for name in self.manifest.tensors if training else self.names:
            for region in self.manifest.tensors[name].regions:
                if region not in self._verified:
                    names[region] = name
        marks = "".join("01"[region in self._crcs] for region in names)
        read_by = zip(*of_all(marks, mesh), strict=True)
        unread = [region for region, read in zip(names, read_by, strict=True) if "1" not in read]
        auxiliary = list(self.manifest.auxiliary) if names else []
        try:
            with agreed(mesh):
                share = unread[world.rank :: world.size]
                run_jobs([partial(self._sum, region) for region in share], CPU)
                problems = dict.fromkeys(self._problems.values())
                for region, name in names.items():
                    crc = self._crcs.get(region, region.crc32)
                    if region not in self._problems and crc != region.crc32:
                        wrong = f"{region.file}: {name} {region.slices}"
                        problems[f"{wrong} does not match its checksum"] = None
                for name in auxiliary[world.rank :: world.size]:
                    if self._is_damaged(name):
                        problems[f"{name} does not match its checksum"] = None
                if problems:
                    remedy = "use an older checkpoint or another copy"
                    raise CheckpointError(
                        f"{self.path} is damaged; {remedy}:\n{listing([*problems])}"
                    )
        except CheckpointError as error:
            raise DamagedError(str(error), self.path) from error
        self._verified.update(names)
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

    def _is_damaged(self, name: str) -> bool:
        stored = self.manifest.auxiliary[name]
        size = 0
        crc = 0
        for block in file_blocks(contained(self.path, name)):
            size += len(block)
            crc = zlib.crc32(block, crc)
        return (size, crc) != (stored.size, stored.crc32)


def open_checkpoint(path: Path | str, mesh: Mesh) -> TensorSource:
    """Open a checkpoint of either kind; call `verify_checksums` before using what was read.

    Collective.
    """
    with agreed(mesh):
        if (Path(path) / MANIFEST).exists():
            return ShardedReader(path)
        return HFReader(path)
