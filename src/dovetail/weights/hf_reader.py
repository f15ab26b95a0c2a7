"""Reads tensors or slices of checkpoints; Hugging Face directories."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, listing
from dovetail.jsonl import parse_json
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index, overlap, within
from dovetail.weights.parallel_read import Job, job_parts
from dovetail.weights.safe_paths import INDEX, SINGLE, contained, refuse_without_safetensors
from dovetail.weights.safetensors import TensorFile


@dataclass(frozen=True)
class StoredRegion:
    file: str
    key: str
    slices: Slices
    crc32: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.slices)


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: tuple[StoredRegion, ...]


class TensorSource:
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
        tensor = self.tensors[name]
        slices = tuple((0, length) for length in tensor.shape) if slices is None else slices
        out = torch.empty([stop - start for start, stop in slices], dtype=tensor.dtype)
        for region in tensor.regions:
            if (shared := overlap(slices, region.slices)) is not None:
                piece = self._files[region.file].read(region.key, within(shared, region.slices))
                if shared == slices:
                    return piece
                out[as_index(within(shared, slices))] = piece
        return out

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[Job]:
        for region in self.tensors[name].regions:
            if (shared := overlap(slices, region.slices)) is not None:
                here = within(shared, region.slices)
                place = out[as_index(within(shared, slices))]
                whole = (
                    self.has_checksums and shared == region.slices
                )  # one job verifies a whole region
                for part, target in (
                    [(here, place)] if whole else job_parts(here, place, self.dtype(name))
                ):
                    yield partial(self._fill, region, part, target)

    def _fill(self, region: StoredRegion, part: Slices, out: Tensor, buffer: Tensor) -> None:
        self._files[region.file].fill(region.key, part, out, buffer)

    def verify_checksums(self, mesh: Mesh) -> None:
        """Raise on every rank if data read is damaged. HF has no checksums. Collective."""


class HFReader(TensorSource):
    """A directory with `model.safetensors`, or with an index and its files."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        index = dict[str, str]()
        if (path / SINGLE).exists():
            names = [SINGLE]
        elif (path / INDEX).exists():
            index = _weight_map(path)
            names = sorted(set(index.values()))
        else:
            refuse_without_safetensors(path)
        files = {name: TensorFile(contained(path, name)) for name in names}
        file_of: dict[str, str] = {}
        problems = [
            f"{n}: {file} does not hold it"
            for n, file in index.items()
            if n not in files[file].entries
        ]
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
            region = StoredRegion(file_name, name, tuple((0, length) for length in entry.shape))
            tensors[name] = StoredTensor(entry.dtype, entry.shape, (region,))
        super().__init__(path, files, tensors)


def _weight_map(path: Path) -> dict[str, str]:
    index = path / INDEX
    files = parse_json(contained(path, INDEX).read_bytes(), str(index)).get("weight_map")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(file, str) for file in files.values())
    ):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    wrong = [f"{name}: {file}" for name, file in files.items() if not file.endswith(".safetensors")]
    if wrong:
        raise CheckpointError(f"{index} names files that are not safetensors:\n{listing(wrong)}")
    return files
