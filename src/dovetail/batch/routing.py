"""Routing traces, and the routes of a micro-batch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.errors import DataError
from dovetail.kernels.reference import count_rows
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import sum_over


def narrow_dtype(experts: int) -> torch.dtype:
    return torch.uint8 if experts <= 256 else torch.int32


@dataclass(frozen=True)
class RoutingTrace:
    layers: tuple[int, ...]
    indices: Tensor  # experts, int32 [T, M, K], in M layers
    valid: Tensor  # bool [T]; elsewhere the router chooses

    def __len__(self) -> int:
        return int(self.valid.shape[0])

    def of(self, layer: int) -> Tensor:
        return self.indices[:, self.layers.index(layer)]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "RoutingTrace":
        return replace(self, indices=fn(self.indices), valid=fn(self.valid))

    def padded(self, missing: int) -> "RoutingTrace":
        """Returns the trace with as many more tokens, which the router places."""
        indices = F.pad(self.indices, (0, 0, 0, 0, 0, missing))
        valid = F.pad(self.valid, (0, missing))
        return replace(self, indices=indices, valid=valid)

    @classmethod
    def cat(cls, traces: Iterable["RoutingTrace"]) -> "RoutingTrace":
        parts = list(traces)
        assert all(part.layers == parts[0].layers for part in parts)
        indices = torch.cat([part.indices for part in parts])
        valid = torch.cat([part.valid for part in parts])
        return cls(parts[0].layers, indices, valid)

    def agreement(self, other: "RoutingTrace") -> float:
        """The share of (token, layer) pairs, valid in both, with the same experts."""
        both = self.valid & other.valid
        ours = self.indices[both].sort(-1).values
        theirs = other.indices[both].sort(-1).values
        same = (ours == theirs).all(-1)
        if not same.numel():
            return 1.0
        return float(same.to(torch.float64).mean())


def join_traces(rows: Iterable[tuple[int, RoutingTrace | None]]) -> RoutingTrace | None:
    """rows: tokens and trace."""
    pairs = list(rows)
    traces = [trace for _, trace in pairs if trace is not None]
    if not traces:
        return None
    layers = traces[0].layers
    for index, (tokens, trace) in enumerate(pairs):
        if trace is None:
            raise DataError(
                f"sequence {index} has no routing, which others have; give it to all or none"
            )
        if len(trace) != tokens:
            raise DataError(f"sequence {index} has {tokens} tokens but routing for {len(trace)}")
        if trace.layers != layers:
            raise DataError(
                f"sequence {index} is routed in layers {trace.layers}, others in {layers}"
            )
    return RoutingTrace.cat(traces)


@dataclass(frozen=True)
class Balance:
    """Losses of the router, both times `weight`.

    A sequence has aux_coef E / (K n) sum_e c_e p_e, with c_e its tokens of expert e and p the mean
    score (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A token has z_coef (log-sum-exp of its
    logits)^2 (arXiv 2202.08906).
    """

    counted: Tensor  # bool [t], without padding
    owner: Tensor  # int64 [t], sequences
    lengths: Tensor  # [S]
    axes: tuple[Axis, ...]
    aux_coef: float = 0.0
    z_coef: float = 0.0
    weight: float = 0.0


@dataclass
class Routes:
    """Experts of one rank's tokens [t] of a micro-batch, by layer."""

    replay: RoutingTrace | None = None
    balance: Balance | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)  # int32 [t, K], for recomputation
    loads: dict[int, Tensor] = field(default_factory=dict)  # [S, E], of this rank's tokens
    # [S, E], of all ranks', for balance losses
    shared: dict[int, Tensor] = field(default_factory=dict)
    costs: dict[int, Tensor] = field(default_factory=dict)  # [2], sums of the balance losses

    def choose(self, layer: int, live: Callable[[], Tensor]) -> Tensor:
        """int64 [t, K]."""
        if layer not in self.chosen:
            indices = live().to(torch.int32)
            replay = self.replay
            if replay is not None:
                valid = replay.valid[:, None]
                indices = torch.where(valid, replay.of(layer), indices)
            self.chosen[layer] = indices
        return self.chosen[layer].long()

    def cost(self, layer: int, logits: Tensor, scores: Tensor) -> Tensor | None:
        """The layer's balance losses. logits, scores: [t, E]."""
        b = self.balance
        if b is None:
            return None
        experts = scores.shape[1]
        if layer not in self.loads:
            self._record_loads(b, layer, experts)
        if not (b.aux_coef or b.z_coef):
            return None
        top_k = self.chosen[layer].shape[1]
        even = experts / (top_k * b.lengths.to(scores.dtype))  # 1 over an even load
        relative = self.shared[layer] * even[:, None]
        shares = scores / scores.sum(-1, keepdim=True)
        aux = (relative[b.owner] * shares).sum(-1)
        z = logits.logsumexp(-1).square()
        aux_total = torch.where(b.counted, aux, 0.0).sum()
        z_total = torch.where(b.counted, z, 0.0).sum()
        costs = torch.stack([aux_total, z_total])
        self.costs[layer] = costs.detach()
        return b.weight * (b.aux_coef * costs[0] + b.z_coef * costs[1])

    def _record_loads(self, b: Balance, layer: int, experts: int) -> None:
        at = b.owner[:, None] * experts + self.chosen[layer]
        counted = b.counted[:, None].expand_as(at)
        rows = len(b.lengths) * experts
        loads = count_rows(at.flatten(), rows, counted.flatten())
        loads = loads.view(-1, experts)
        self.loads[layer] = loads
        if b.aux_coef or b.z_coef:
            for axis in b.axes:
                loads = sum_over(loads, axis)
        self.shared[layer] = loads
