"""Reads tensors, or slices of them, from a Hugging Face directory."""

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, listing
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices
from dovetail.weights.parallel_read import Job, job_parts
from dovetail.weights.safe_paths import INDEX, SINGLE, contained, refuse_without_safetensors
from dovetail.weights.safetensors import TensorFile, parse_json


class TensorSource(Protocol):
    """Named tensors that can be read in slices."""

    path: Path

    @property
    def names(self) -> Collection[str]: ...

    @property
    def bytes_read(self) -> int: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor, or a rectangle of it, on the CPU in its own dtype."""
        ...

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[Job]:
        """Jobs that read a rectangle into `out`, of any dtype, device and strides."""
        ...

    def verify_checksums(self, mesh: Mesh) -> None:
        """Raise on every rank where anything that was read is damaged. Collective."""
        ...


class CheckpointReader:
    """A directory with `model.safetensors`, or with an index and its files."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        index: dict[str, str] = {}
        if (self.path / SINGLE).exists():
            files = [SINGLE]
        elif (self.path / INDEX).exists():
            index = self._weight_map()
            files = sorted(set(index.values()))
        else:
            refuse_without_safetensors(self.path)
        self._files = {name: TensorFile(contained(self.path, name)) for name in files}
        self._file_of: dict[str, TensorFile] = {}
        problems = [
            f"{name}: {file} does not hold it" for name, file in index.items() if name not in self._files[file].entries
        ]
        for file_name, file in self._files.items():
            for name in file.entries:
                if name in self._file_of and name not in index:
                    problems.append(f"{name}: both {file_name} and {self._file_of[name].path.name} hold it")
                if index.get(name, file_name) == file_name:
                    self._file_of[name] = file
        if problems:
            raise CheckpointError(f"{self.path / INDEX} does not match its files:\n{listing(problems)}")

    def _weight_map(self) -> dict[str, str]:
        data = contained(self.path, INDEX).read_bytes()
        files = parse_json(data, str(self.path / INDEX)).get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{self.path / INDEX}: weight_map must map tensor names to file names")
        wrong = [f"{name}: {file}" for name, file in files.items() if not file.endswith(".safetensors")]
        if wrong:
            raise CheckpointError(f"{self.path / INDEX} names files that are not safetensors:\n{listing(wrong)}")
        return files

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._file_of[name].entries[name].dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._file_of[name].read(name, slices)

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[Job]:
        for part, target in job_parts(slices, out, self.dtype(name)):
            yield partial(self._file_of[name].fill, name, part, target)

    def verify_checksums(self, mesh: Mesh) -> None:
        """The format has none."""
