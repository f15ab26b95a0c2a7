"""Reads sharded checkpoints in any layout, and verifies their checksums."""

import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dovetail.checkpoint.manifest import TRAINING, Manifest, StoredFile, StoredRegion, StoredTensor
from dovetail.errors import CheckpointError, DamagedError, listing
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index, overlap, within
from dovetail.weights.atomic import file_blocks
from dovetail.weights.hf_reader import CheckpointReader, TensorSource
from dovetail.weights.parallel_read import JOB_BYTES, Job, job_parts, run_jobs
from dovetail.weights.safe_paths import MANIFEST, contained
from dovetail.weights.safetensors import TensorFile

POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x^0, as in the checksums
ONE, X = 1 << 31, 1 << 30
Sums = list[tuple[int, int]]  # (checksum, bytes) of the parts of a piece
UNREAD = (0, -1)
CPU = torch.device("cpu")


def combined_crc(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of consecutive parts, from (checksum, bytes) of each, like zlib's crc32_combine.

    A checksum is a polynomial over GF(2): appending n bytes multiplies it by x^(8 n) modulo CRC-32's.
    """
    whole = 0
    for crc, num_bytes in parts:
        whole = _times(_power_of_x(8 * num_bytes), whole) ^ crc if whole else crc
    return whole


def _times(first: int, second: int) -> int:
    product = 0
    while first:
        if first & ONE:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (POLYNOMIAL if second & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    result, square = ONE, X
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square, exponent = _times(square, square), exponent >> 1
    return result


class ShardedReader:
    """A sharded checkpoint with a valid manifest and headers; `verify_checksums` checks the data."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        what = str(self.path / MANIFEST)
        self.manifest = Manifest.parse(contained(self.path, MANIFEST).read_bytes(), what)
        self._stored = {name: name for name in self.manifest.tensors}  # name -> the manifest's
        own = {name: None for name in self.manifest.tensors if not name.startswith(TRAINING)}
        self._names: Collection[str] = own.keys()
        self._files = {name: self._open(name, stored) for name, stored in self.manifest.pieces.items()}
        self._sums: dict[StoredRegion, Sums] = {}  # of pieces not yet compared
        self._problems: dict[StoredRegion, str] = {}
        self._verified: set[StoredRegion] = set()
        for name, tensor in self.manifest.tensors.items():
            for region in tensor.regions:
                entry = self._files[region.file].entries.get(region.key)
                shape = tuple(stop - start for start, stop in region.slices)
                if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, shape):
                    raise CheckpointError(
                        f"{self.path / region.file} does not hold {name} as {what} says: {region.slices}"
                    )

    def _open(self, name: str, stored: StoredFile) -> TensorFile:
        """A file of pieces; an error says which tensors are lost."""
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

    def training_state(self, start: str, others: Collection[str] = ()) -> "ShardedReader":
        """A view of the tensors whose names begin with `start`, without that, and of `others` that are not there."""
        view = copy(self)
        view.path = self.path / start  # as errors name it
        view._stored = {name: name for name in others}
        view._stored |= {name.removeprefix(start): name for name in self.manifest.tensors if name.startswith(start)}
        view._names = view._stored.keys()
        return view

    @property
    def names(self) -> Collection[str]:
        """The model's tensors, without training state."""
        return self._names

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def _tensor(self, name: str) -> StoredTensor:
        return self.manifest.tensors[self._stored[name]]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        tensor = self._tensor(name)
        slices = tuple((0, length) for length in tensor.shape) if slices is None else slices
        out = torch.empty([stop - start for start, stop in slices], dtype=tensor.dtype)
        for region in tensor.regions:
            shared = overlap(slices, region.slices)
            if shared is None:
                continue
            piece = self._files[region.file].read(region.key, within(shared, region.slices))
            if shared == slices:
                return piece  # without a second copy
            out[as_index(within(shared, slices))] = piece
        return out

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[Job]:
        """Jobs that read a rectangle into `out`, and checksum the pieces that they read whole."""
        for region in self._tensor(name).regions:
            shared = overlap(slices, region.slices)
            if shared is None:
                continue
            here, place = within(shared, region.slices), out[as_index(within(shared, slices))]
            parts = list(job_parts(here, place, self.dtype(name)))
            sums: Sums | None = None
            if shared == region.slices and region not in self._verified:
                sums = self._sums[region] = [UNREAD] * len(parts)
            for at, (part, target) in enumerate(parts):
                yield partial(self._fill, region, part, target, sums, at)

    def _fill(
        self, region: StoredRegion, part: Slices, out: Tensor, sums: Sums | None, at: int, buffer: Tensor
    ) -> None:
        with self._problem_noted(region):
            file = self._files[region.file]
            crc = file.fill(region.key, part, out, buffer, checksum=sums is not None)
            if sums is not None:
                sums[at] = crc, out.numel() * file.entries[region.key].dtype.itemsize

    def verify_checksums(self, mesh: Mesh, *, training: bool = False) -> None:
        """Compare the checksums of the model, or with `training` of everything, reading what no rank has read.

        Raises DamagedError on every rank. Collective.
        """
        world, names = mesh["world"], self.manifest.tensors if training else self.names
        pieces = [(name, region) for name in names for region in self.manifest.tensors[name].regions]
        pieces = [piece for piece in pieces if piece[1] not in self._verified]
        marks = "".join("01"[region in self._sums] for _, region in pieces)
        everyone = gather_text(marks, world, mesh.device)
        unread = [piece for piece, *read in zip(pieces, *everyone, strict=True) if "1" not in read]
        sides = list(self.manifest.sides) if pieces else []
        try:
            with agreed(mesh):
                run_jobs([job for piece in unread[world.rank :: world.size] for job in self._sum_jobs(*piece)], CPU)
                problems = list(self._problems.values()) + [self._damage(*piece) for piece in pieces]
                problems += [self._side_damage(name) for name in sides[world.rank :: world.size]]
                if any(problems):
                    text = listing([problem for problem in dict.fromkeys(problems) if problem])
                    raise CheckpointError(f"{self.path} is damaged; use an older checkpoint or another copy:\n{text}")
        except CheckpointError as error:
            raise DamagedError(str(error), self.path) from error
        self._verified |= {region for _, region in pieces}
        self._sums.clear()

    def verify(self) -> None:
        """Compare all checksums, in one process."""
        self.verify_checksums(Mesh.solo(), training=True)

    def _sum_jobs(self, name: str, region: StoredRegion) -> Iterator[Job]:
        num_bytes = prod(stop - start for start, stop in region.slices) * self.dtype(name).itemsize
        spans = [(at, min(at + JOB_BYTES, num_bytes)) for at in range(0, num_bytes, JOB_BYTES)]
        sums = self._sums[region] = [UNREAD] * len(spans)
        return (partial(self._sum, region, span, sums, at) for at, span in enumerate(spans))

    def _sum(self, region: StoredRegion, span: tuple[int, int], sums: Sums, at: int, buffer: Tensor) -> None:
        with self._problem_noted(region):
            sums[at] = self._files[region.file].checksum(region.key, *span, buffer), span[1] - span[0]

    @contextmanager
    def _problem_noted(self, region: StoredRegion) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._problems[region] = f"{region.file}: {region.key} {region.slices}: {error}"

    def _damage(self, name: str, region: StoredRegion) -> str:
        sums = self._sums.get(region)
        if sums is None or region in self._problems or (UNREAD not in sums and combined_crc(sums) == region.crc32):
            return ""
        return f"{region.file}: {name} {region.slices} does not match its checksum"

    def _side_damage(self, name: str) -> str:
        stored, size, crc = self.manifest.sides[name], 0, 0
        for block in file_blocks(contained(self.path, name)):
            size, crc = size + len(block), zlib.crc32(block, crc)
        return "" if (size, crc) == (stored.size, stored.crc32) else f"{name} does not match its checksum"


def open_checkpoint(path: Path | str, mesh: Mesh) -> TensorSource:
    """A reader of an HF directory or a sharded checkpoint. Collective. Call `verify_checksums` before using what was read."""
    source: TensorSource | None = None
    with agreed(mesh):
        source = ShardedReader(path) if (Path(path) / MANIFEST).exists() else CheckpointReader(path)
    assert source is not None
    return source
