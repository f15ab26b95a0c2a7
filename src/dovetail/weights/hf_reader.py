"""Readers of checkpoints, whole tensors or slices: any source, and Hugging Face directories."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, listing
from dovetail.jsonl import parse_json
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index, overlap, shape_of, whole, within
from dovetail.weights.parallel_read import ReadJob, job_parts
from dovetail.weights.safe_paths import INDEX, SINGLE, contained, refuse_without_safetensors
from dovetail.weights.safetensors import TensorFile


@dataclass(frozen=True)
class StoredRegion:
    """A rectangle of a tensor, and the file that has it."""

    file: str
    key: str
    slices: Slices
    crc32: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.slices)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, in as many regions as its files have."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: tuple[StoredRegion, ...]


class TensorSource:
    """The tensors of a checkpoint, by name."""

    has_checksums = False

    def __init__(
        self, path: Path, files: Mapping[str, TensorFile], tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.path = path
        self.tensors = tensors
        self._files = files
        self.names: Collection[str] = tensors.keys()

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Return a tensor, or a rectangle of it."""
        tensor = self.tensors[name]
        if slices is None:
            slices = whole(tensor.shape)
        out = torch.empty(shape_of(slices), dtype=tensor.dtype)
        for region in tensor.regions:
            shared = overlap(slices, region.slices)
            if shared is None:
                continue
            values = self._files[region.file].read(region.key, within(shared, region.slices))
            if shared == slices:
                return values
            out[as_index(within(shared, slices))] = values
        return out

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[ReadJob]:
        """Yield the jobs that read a rectangle into `out`."""
        for region in self.tensors[name].regions:
            shared = overlap(slices, region.slices)
            if shared is None:
                continue
            stored = within(shared, region.slices)
            target = out[as_index(within(shared, slices))]
            if self.has_checksums and shared == region.slices:
                yield partial(self._fill, region, stored, target)  # verifies the whole region
                continue
            for part, part_target in job_parts(stored, target, self.dtype(name)):
                yield partial(self._fill, region, part, part_target)

    def _fill(self, region: StoredRegion, part: Slices, out: Tensor, buffer: Tensor) -> None:
        self._files[region.file].fill(region.key, part, out, buffer)

    def verify_checksums(self, mesh: Mesh) -> None:
        """Raise CheckpointError on every rank if data read is damaged.

        HF has no checksums. Collective.
        """


class HFReader(TensorSource):
    """A directory with `model.safetensors`, or with an index and its files."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        index = {}
        if (path / SINGLE).exists():
            names = [SINGLE]
        elif (path / INDEX).exists():
            index = _weight_map(path)
            names = sorted(set(index.values()))
        else:
            refuse_without_safetensors(path)
        files = {name: TensorFile(contained(path, name)) for name in names}
        file_of: dict[str, str] = {}
        problems = []
        for name, file_name in index.items():
            if name not in files[file_name].entries:
                problems.append(f"{name}: {file_name} does not hold it")
        for file_name, file in files.items():
            for name in file.entries:
                if name in file_of and name not in index:
                    problems.append(f"{name}: both {file_name} and {file_of[name]} hold it")
                if index.get(name, file_name) == file_name:
                    file_of[name] = file_name
        if problems:
            raise CheckpointError(f"{path / INDEX} does not match its files:\n{listing(problems)}")
        tensors = {}
        for name, file_name in file_of.items():
            entry = files[file_name].entries[name]
            region = StoredRegion(file_name, name, whole(entry.shape))
            tensors[name] = StoredTensor(entry.dtype, entry.shape, (region,))
        super().__init__(path, files, tensors)


def _weight_map(path: Path) -> dict[str, str]:
    index = path / INDEX
    content = contained(path, INDEX).read_bytes()
    files = parse_json(content, str(index)).get("weight_map") or None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    wrong = [f"{name}: {file}" for name, file in files.items() if not file.endswith(".safetensors")]
    if wrong:
        raise CheckpointError(f"{index} names files that are not safetensors:\n{listing(wrong)}")
    return files
