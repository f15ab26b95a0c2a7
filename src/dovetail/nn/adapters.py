"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021).

    y  = x w.T + scale (x A.T) B.T          w [out, in] frozen, A [rank, in], B [out, rank]
    dx = dy w  + scale (dy B) A
    dA = scale (dy B).T x                   dB = scale dy.T (x A.T)

The adapter of a layer is in the parallel state of its base. Over tp:

column      B is sharded as w, A is whole: its gradient is partial, as dy B is
row         A is sharded as w, B is whole: its gradient is partial, as x A.T is;
            the reduce-scatter of y sums the products
replicated  both are whole, and see this rank's tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.kernels.registry import KernelSet
from dovetail.nn.adapter_options import AdapterOptions
from dovetail.nn.layers import Linear
from dovetail.nn.model import StagedModel
from dovetail.nn.moe import Experts
from dovetail.nn.products import AccumulateGrad, AddWeightGrad, Products
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Part, Placement, Split, checkpoint_names, placements_of


class Lora(nn.Module):
    """The adapter of one checkpoint matrix; A and B are the parts that this rank holds."""

    def __init__(
        self,
        rank: int,
        scale: float,
        out_features: int,
        in_features: int,
        placements: Mapping[str, Placement],
    ) -> None:
        super().__init__()
        self.scale = scale
        self.enabled = True
        self.lora_A = nn.Parameter(torch.empty(rank, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, rank))
        self.placements = dict(placements)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, in] -> scale (x A.T) B.T [t, out], with autograd."""
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


class LoraProducts(Products):
    """The products of a frozen weight and of the adapters of its rows."""

    fused = False

    def __init__(self, kernels: KernelSet, adapters: Sequence[tuple[slice, Lora]]) -> None:
        """adapters: (rows of the weight, their adapter)."""
        super().__init__(kernels)
        self.adapters = adapters

    @property
    def trains_adapters(self) -> bool:
        return any(lora.enabled and lora.lora_A.requires_grad for _, lora in self.adapters)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().linear(x, weight, bias)
        for rows, lora in self._enabled():
            hidden = super().linear(x, lora.lora_A)
            y[:, rows].addmm_(hidden, lora.lora_B.t(), alpha=lora.scale)
        return y

    def input_grad(self, dy: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        dx = super().input_grad(dy, weight, out)
        for rows, lora in self._enabled():
            d_hidden = dy[:, rows] @ lora.lora_B
            dx.addmm_(d_hidden, lora.lora_A, alpha=lora.scale)
        return dx

    def add_adapter_grads(self, accumulate: AccumulateGrad, dy: Tensor, x: Tensor) -> None:
        for rows, lora in self._enabled():
            hidden = super().linear(x, lora.lora_A)
            d_hidden = dy[:, rows] @ lora.lora_B
            accumulate(lora.lora_A, d_hidden * lora.scale, x, self.add_weight_grad_)
            accumulate(lora.lora_B, dy[:, rows], hidden * lora.scale, self.add_weight_grad_)

    def _enabled(self) -> Iterator[tuple[slice, Lora]]:
        for rows, lora in self.adapters:
            if lora.enabled:
                yield rows, lora


class LoraExperts(nn.Module):
    """The adapters of a matrix of every expert; A and B are the parts that this rank holds."""

    def __init__(
        self,
        rank: int,
        scale: float,
        shape: tuple[int, int, int],
        placements: Mapping[str, Placement],
    ) -> None:
        """shape: [E, out, in] of the experts' matrices."""
        super().__init__()
        self.scale = scale
        self.enabled = True
        count, out_features, in_features = shape
        self.lora_A = nn.Parameter(torch.empty(count, rank, in_features))
        self.lora_B = nn.Parameter(torch.empty(count, out_features, rank))
        self.placements = dict(placements)


ExpertAdapter = tuple[slice, LoraExperts]  # rows of every expert's matrix, their adapter


class LoraExpertProducts(Products):
    """The products of frozen experts and of their adapters."""

    fused = False

    def __init__(
        self,
        kernels: KernelSet,
        gate_up: Sequence[ExpertAdapter],
        down: Sequence[ExpertAdapter],
    ) -> None:
        super().__init__(kernels)
        self.gate_up = gate_up
        self.down = down

    def mixture_of_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        matrices: tuple[Tensor, Tensor],
        copies: int | None = None,
        add: AddWeightGrad | None = None,
    ) -> Tensor:
        kernels = self.kernels
        gate_up, down = matrices
        permuted, rows, ends = kernels.permute(x, experts, len(gate_up), copies)
        hidden = kernels.swiglu(self._adapted(permuted, gate_up, ends, self.gate_up))
        y = self._adapted(hidden, down, ends, self.down)
        return kernels.unpermute(y, rows, weights)

    def _adapted(
        self, x: Tensor, weight: Tensor, ends: Tensor, adapters: Sequence[ExpertAdapter]
    ) -> Tensor:
        y = self.grouped(x, weight, ends)
        for rows, lora in adapters:
            if lora.enabled:
                hidden = self.grouped(x, lora.lora_A, ends)
                delta = self.grouped(hidden, lora.lora_B, ends) * lora.scale
                y = torch.cat((y[:, : rows.start], y[:, rows] + delta, y[:, rows.stop :]), 1)
        return y


class AdaptedLinear(nn.Linear):
    """A frozen layer of transformers with its adapter."""

    def __init__(self, base: nn.Linear, leaf: str, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.adapters = nn.ModuleDict({leaf: lora})
        self.lora = (lora,)  # a tuple hides it from `children`

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        (lora,) = self.lora
        return y + lora(x) if lora.enabled else y


def add_adapters(
    model: StagedModel, mesh: Mesh, options: AdapterOptions, dtype: torch.dtype
) -> list[str]:
    """Freeze the model and give the layers that `options` names adapters in `dtype`.

    Returns the checkpoint's names of these layers. Call it before the model is sharded over data.
    """
    model.requires_grad_(False)
    model.adapter = options
    placements = placements_of(model)
    adapted: list[str] = []
    for name, module in [*model.named_modules()]:
        if isinstance(module, Linear):
            base = placements[f"{name}.weight"]
            parts = _row_parts(base, module.weight, mesh["tp"].size)
            adapted += _adapt(name, module, base, parts, options, dtype)
        elif isinstance(module, Experts):
            adapted += _adapt_experts(name, module, mesh["tp"].size, options, dtype)
        elif isinstance(module, nn.Linear) and options.includes(name):
            lora = _make(name, module.weight, {}, options, dtype)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, AdaptedLinear(module, leaf, lora))
            adapted.append(name)
    return adapted


def _adapt(
    name: str,
    layer: Linear,
    base: Placement,
    parts: list[tuple[slice, Part | None]],
    options: AdapterOptions,
    dtype: torch.dtype,
) -> list[str]:
    weights = checkpoint_names(f"{name}.weight", base)
    modules = [weight.removesuffix(".weight") for weight in weights]
    loras = nn.ModuleDict()
    adapters = []
    adapted = []
    for module, (rows, part) in zip(modules, parts, strict=True):
        if not options.includes(module):
            continue
        lora = _make(module, layer.weight[rows], _placements(base, part), options, dtype)
        loras[module.rpartition(".")[2]] = lora
        adapters.append((rows, lora))
        adapted.append(module)
    if adapters:
        layer.adapters = loras
        layer.products = LoraProducts(layer.products.kernels, adapters)
    return adapted


def _adapt_experts(
    name: str, layer: Experts, tp: int, options: AdapterOptions, dtype: torch.dtype
) -> list[str]:
    loras = nn.ModuleDict()
    adapters: dict[str, list[ExpertAdapter]] = {"gate_up_proj": [], "down_proj": []}
    for weight_name, chosen in adapters.items():
        weight = layer.get_parameter(weight_name)
        base = layer.placements[weight_name]
        for leaf, rows, parts in _expert_matrices(weight_name, weight, base, tp, options):
            module = f"{name}.{leaf}"
            if not options.includes(module):
                continue
            shape = (len(weight), rows.stop - rows.start, weight.shape[2])
            rank = options.rank_of(module)
            with torch.device(weight.device):
                lora = LoraExperts(
                    rank, options.scale_of(module), shape, _expert_placements(base, parts)
                )
            loras[leaf] = lora.to(dtype)
            chosen.append((rows, lora))
    if loras:
        layer.adapters = loras
        layer.products = LoraExpertProducts(layer.products.kernels, *adapters.values())
    return [f"{name}.{leaf}" for leaf in loras]


def _expert_matrices(
    weight_name: str, weight: Tensor, base: Placement, tp: int, options: AdapterOptions
) -> Iterator[tuple[str, slice, tuple[Part, ...]]]:
    """Yield the name, the local rows and the parts of dim 1 of each adapted matrix."""
    split = next((split for split in base.splits if split.dim == 1), None)
    if split is None or options.experts == "stacked":
        parts = () if split is None else split.parts
        yield weight_name, slice(0, weight.shape[1]), parts
        return
    start = 0
    for leaf, part in zip(("gate_proj", "up_proj"), split.parts, strict=True):
        stop = start + part.local_length(tp)
        yield leaf, slice(start, stop), (part,)
        start = stop


def _expert_placements(base: Placement, parts: tuple[Part, ...]) -> dict[str, Placement]:
    """Return the placements of A and B beside experts of placement `base`. parts: of rows."""
    by_expert = base.splits[0]
    columns = tuple(split for split in base.splits if split.dim == 2)
    whole = Placement((by_expert,), ("tp",), base.sharded_over)
    if columns:
        return {
            "lora_A": Placement((by_expert, *columns), (), base.sharded_over),
            "lora_B": whole,
        }
    rows = Split(1, "tp", parts)
    return {"lora_A": whole, "lora_B": Placement((by_expert, rows), (), base.sharded_over)}


def _make(
    module: str,
    weight: Tensor,
    placements: Mapping[str, Placement],
    options: AdapterOptions,
    dtype: torch.dtype,
) -> Lora:
    out_features, in_features = weight.shape
    rank = options.rank_of(module)
    with torch.device(weight.device):
        lora = Lora(rank, options.scale_of(module), out_features, in_features, placements)
    return lora.to(dtype)


def _row_parts(base: Placement, weight: Tensor, tp: int) -> list[tuple[slice, Part | None]]:
    """Return the local rows of each checkpoint matrix; the part: None where rows are whole."""
    for split in base.splits:
        if split.dim == 0:
            ranges: list[tuple[slice, Part | None]] = []
            start = 0
            for part in split.parts:
                stop = start + part.local_length(tp)
                ranges.append((slice(start, stop), part))
                start = stop
            return ranges
    return [(slice(0, len(weight)), None)]


def _placements(base: Placement, part: Part | None) -> dict[str, Placement]:
    """Return the placements of A and B beside a weight of placement `base`."""
    columns = [split for split in base.splits if split.dim == 1]
    partial = Placement(partial_over=("tp",))
    if part is not None:
        rows = Split(0, "tp", (Part("", part.size, part.copies, part.padding),))
        return {"lora_A": partial, "lora_B": Placement((rows,))}
    if columns:
        return {"lora_A": Placement(tuple(columns)), "lora_B": partial}
    return {"lora_A": partial, "lora_B": partial}


def adapters_of(model: nn.Module) -> list[Lora | LoraExperts]:
    return [module for module in model.modules() if isinstance(module, (Lora, LoraExperts))]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run the base alone, such as a reference policy."""
    adapters = adapters_of(model)
    for lora in adapters:
        lora.enabled = False
    try:
        yield
    finally:
        for lora in adapters:
            lora.enabled = True
