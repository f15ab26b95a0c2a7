"""A checkpoint with an adapter of PEFT added to it, read slice by slice."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, listing
from dovetail.kernels.reference import wide
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index, whole
from dovetail.weights.adapters import DOWN, UP
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.parallel_read import ReadJob
from dovetail.weights.peft import (
    PREFIX,
    expert_name,
    from_stacked,
    open_adapter,
    read_options,
    stacked_name,
)

# The matrix of an expert, and the tensor of all experts, in a checkpoint of the base.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
MIXTRAL: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
HALVES: Mapping[str, int] = {"gate_proj": 0, "up_proj": 1}  # of gate_up_proj


class MergedSource(TensorSource):
    """The tensors of `base` with the products of an adapter added, in the dtypes of the base.

    CheckpointError if the adapter has tensors that fit none of the base's.
    """

    def __init__(self, base: TensorSource, path: Path) -> None:
        super().__init__(base.path, {}, base.tensors)
        self.base = base
        self.options = read_options(path)
        self.is_stacked = self.options.experts == "stacked"
        self.adapter = open_adapter(path)
        self._read_adapter = lru_cache(maxsize=4)(self.adapter.read)
        self.adapted: set[str] = set()
        unused = set(self.adapter.names)
        for name in base.names:
            for adapter in self._adapters_of(name):
                if f"{adapter}{DOWN}.weight" in self.adapter.names:
                    self.adapted.add(name)
                    unused -= {f"{adapter}{DOWN}.weight", f"{adapter}{UP}.weight"}
        if unused:
            question = "is it an adapter of this model?"
            extra = listing([f"extra: {name}" for name in sorted(unused)])
            raise CheckpointError(f"{path} does not fit {base.path}; {question}\n{extra}")

    @property
    def bytes_read(self) -> int:
        return self.base.bytes_read

    def verify_checksums(self, mesh: Mesh) -> None:
        self.base.verify_checksums(mesh)

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[ReadJob]:
        if name in self.adapted:
            yield partial(self._fill_merged, name, slices, out)
        else:
            yield from self.base.jobs(name, slices, out)

    def _fill_merged(self, name: str, slices: Slices, out: Tensor, _buffer: Tensor) -> None:
        out.copy_(self.read(name, slices))

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        weight = self.base.read(name, slices)
        if name not in self.adapted:
            return weight
        shape = self.shape(name)
        index = as_index(whole(shape) if slices is None else slices)
        merged = weight.to(wide(weight.dtype))
        if len(shape) == 2:
            delta = self._delta(name)
            self._check(name, delta, shape)
            merged += delta[index]
            return merged.to(weight.dtype)
        experts, *matrix = index
        stem, tensor = _groups(STACKED, name)
        for number, expert in enumerate(range(experts.start, experts.stop)):
            delta = self._expert_delta(stem, expert, tensor)
            if delta.shape != shape[1:]:  # the base holds [E, in, out]
                delta = delta.T
            self._check(name, delta, shape[1:])
            merged[number] += delta[tuple(matrix)]
        return merged.to(weight.dtype)

    def _delta(self, name: str) -> Tensor:
        """Return what is added to a matrix of the base, [out, in]."""
        if EXPERT.fullmatch(name):
            stem, expert, leaf = _groups(EXPERT, name)
            return self._expert_delta(_in_peft(stem), int(expert), MIXTRAL.get(leaf, leaf))
        module = name.removesuffix(".weight")
        return self._product(module, *self._factors(f"{PREFIX}{module}"))

    def _expert_delta(self, stem: str, expert: int, matrix: str) -> Tensor:
        """Return what is added to gate_up_proj, gate_proj, up_proj or down_proj of an expert."""
        if not self.is_stacked:
            parts = []
            for leaf in HALVES if matrix == "gate_up_proj" else (matrix,):
                factors = self._factors(_expert_stem(stem, expert, leaf))
                parts.append(self._product(f"{stem}.{leaf}", *factors))
            return torch.cat(parts)
        tensor = "gate_up_proj" if matrix in HALVES else matrix
        down, up = self._factors(_stacked_stem(stem, tensor))
        count = up.shape[1] // self.options.rank_of(f"{stem}.{tensor}")
        down = from_stacked(DOWN, down, count)[expert]
        up = from_stacked(UP, up, count)[expert]
        delta = self._product(f"{stem}.{tensor}", down, up)
        if matrix not in HALVES:
            return delta
        halves = delta.chunk(2)
        return halves[HALVES[matrix]]

    def _check(self, name: str, delta: Tensor, shape: tuple[int, ...]) -> None:
        if delta.shape != shape:
            sizes = f"the adapter of {name} makes {list(delta.shape)}, the base holds {list(shape)}"
            raise CheckpointError(
                f"{self.adapter.path} does not fit {self.path}: {sizes}; is it an adapter of this "
                "model?"
            )

    def _factors(self, stem: str) -> tuple[Tensor, Tensor]:
        names = (f"{stem}{DOWN}.weight", f"{stem}{UP}.weight")
        for name in names:
            if name not in self.adapter.names:
                raise CheckpointError(f"{self.adapter.path} lacks {name}")
        down, up = map(self._read_adapter, names)
        return down, up

    def _product(self, module: str, down: Tensor, up: Tensor) -> Tensor:
        rank = self.options.rank_of(module)
        if not down.shape[0] == up.shape[-1] == rank:
            found = f"A {list(down.shape)} and B {list(up.shape)} of {module}"
            raise CheckpointError(f"{self.adapter.path}: {found}, but its config says rank {rank}")
        dtype = wide(up.dtype)
        product = up.to(dtype) @ down.to(dtype)
        return product * self.options.scale_of(module)

    def _adapters_of(self, name: str) -> list[str]:
        """Return the stems of the adapter's tensors that change a tensor of the base."""
        if EXPERT.fullmatch(name):
            stem, expert, leaf = _groups(EXPERT, name)
            matrix = MIXTRAL.get(leaf, leaf)
            tensor = "gate_up_proj" if matrix in HALVES else matrix
            if self.is_stacked:
                return [_stacked_stem(_in_peft(stem), tensor)]
            return [_expert_stem(_in_peft(stem), int(expert), matrix)]
        if not STACKED.fullmatch(name):
            return [f"{PREFIX}{name.removesuffix('.weight')}"]
        stem, tensor = _groups(STACKED, name)
        if self.is_stacked:
            return [_stacked_stem(stem, tensor)]
        leaves = tuple(HALVES) if tensor == "gate_up_proj" else (tensor,)
        count = self.shape(name)[0]
        return [_expert_stem(stem, expert, leaf) for expert in range(count) for leaf in leaves]


def _groups(pattern: re.Pattern[str], name: str) -> tuple[str, ...]:
    found = pattern.fullmatch(name)
    assert found is not None
    return found.groups()


def _in_peft(stem: str) -> str:
    return stem.replace(".block_sparse_moe.", ".mlp.")


def _stacked_stem(stem: str, tensor: str) -> str:
    return stacked_name(f"{stem}.{tensor}{DOWN}").removesuffix(f"{DOWN}.weight")


def _expert_stem(stem: str, expert: int, leaf: str) -> str:
    return expert_name(f"{stem}.{leaf}{DOWN}", expert).removesuffix(f"{DOWN}.weight")
