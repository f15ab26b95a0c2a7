"""Which experts tokens go to: as a value that any pass can return and any other can take (router replay), and in flight."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.errors import DataError
from dovetail.kernels.token_permute import count_rows
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.mesh import Axis


def narrow_dtype(experts: int) -> torch.dtype:
    """The narrowest type that numbers this many experts and that every backend sends."""
    return torch.uint8 if experts <= 256 else torch.int32


@dataclass(frozen=True)
class RoutingTrace:
    """The experts of T tokens in the layers that route, named by their numbers in the whole model.

    indices: int32 [T, M, K] for the M layers `layers`. valid: bool [T]; where it is False nothing is known, and a layer that
    is given the trace routes the token itself.
    """

    layers: tuple[int, ...]
    indices: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return int(self.valid.shape[0])

    def of(self, layer: int) -> Tensor:
        """[T, K]: the experts in one layer."""
        return self.indices[:, self.layers.index(layer)]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "RoutingTrace":
        """The same for other tokens, or elsewhere: `fn` acts on dim 0."""
        return replace(self, indices=fn(self.indices), valid=fn(self.valid))

    def padded(self, missing: int) -> "RoutingTrace":
        """With tokens at the end of which nothing is known."""
        return self.map(lambda x: F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)))

    @classmethod
    def cat(cls, traces: Iterable["RoutingTrace"]) -> "RoutingTrace":
        """One after the other; all have the same layers."""
        first, *others = traces
        assert all(other.layers == first.layers for other in others)
        indices = torch.cat([first.indices, *(other.indices for other in others)])
        return replace(first, indices=indices, valid=torch.cat([first.valid, *(other.valid for other in others)]))

    def agreement(self, other: "RoutingTrace") -> float:
        """The share of (token, layer) pairs known to both whose experts are the same, in any order; 1 of none."""
        both = self.valid & other.valid
        same = (self.indices[both].sort(-1).values == other.indices[both].sort(-1).values).all(-1)
        return float(same.to(torch.float64).mean()) if same.numel() else 1.0


def joined(rows: Iterable[tuple[int, RoutingTrace | None]]) -> RoutingTrace | None:
    """The traces of all sequences (tokens, trace), or none of any: what some lack is not made up. Raises DataError."""
    pairs = list(rows)
    found = [trace for _, trace in pairs if trace is not None]
    if not found:
        return None
    for index, (tokens, trace) in enumerate(pairs):
        if trace is None:
            raise DataError(f"sequence {index} has no routing, which others have; give it to all or none")
        if len(trace) != tokens:
            raise DataError(f"sequence {index} has {tokens} tokens but routing for {len(trace)}")
        if trace.layers != found[0].layers:
            raise DataError(f"sequence {index} is routed in layers {trace.layers}, others in {found[0].layers}")
    return RoutingTrace.cat(found)


@dataclass(frozen=True)
class Balance:
    """What keeps experts evenly loaded while this rank's tokens [t] are trained on. Padding does not count.

    A sequence of n tokens, of which c_e went to expert e, costs `aux_coef` x E / (K n) sum_e c_e p_e, p being its tokens' mean
    score (DeepSeek-V3, arXiv 2412.19437, section 2.1.2: 1 where all is even); a token costs `z_coef` x (log-sum-exp of its
    logits)^2 (ST-MoE, arXiv 2202.08906). Sums over a sequence are sums over `axes`, whose ranks share it.
    weight: of one token's cost in the sum that is divided by the loss's count, so that what is left is a mean over tokens.
    """

    counted: Tensor  # bool [t]
    owner: Tensor  # int64 [t]: the sequence of each
    lengths: Tensor  # [S]
    axes: tuple[Axis, ...]
    aux_coef: float = 0.0
    z_coef: float = 0.0
    weight: float = 0.0


@dataclass
class Routes:
    """The routing of one rank's tokens [t] of one micro-batch, while its layers are computed.

    given: experts to take instead of choosing. chosen: layer -> int32 [t, K]; what a layer chose at first stays, so that
    whatever computes it again (activation checkpointing) takes the same path, come what may of its logits. loads: how many
    of a sequence's tokens here each expert has, [S, E]; shared: of all its tokens, where they are asked for. costs: the sums
    of both balance terms.
    """

    given: RoutingTrace | None = None
    balance: Balance | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    shared: dict[int, Tensor] = field(default_factory=dict)
    costs: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, live: Callable[[], Tensor]) -> Tensor:
        """int64 [t, K]: the experts of every token. `live` ranks them by this layer's own scores."""
        if layer not in self.chosen:
            indices = live().to(torch.int32)
            if self.given is not None:
                indices = torch.where(self.given.valid[:, None], self.given.of(layer), indices)
            self.chosen[layer] = indices
        return self.chosen[layer].long()

    def cost(self, layer: int, logits: Tensor, scores: Tensor) -> Tensor | None:
        """What balance costs in a layer with these router logits and scores [t, E]; None where it costs nothing."""
        b = self.balance
        if b is None:
            return None
        if layer not in self.loads:
            self._note_loads(b, layer, scores.shape[1])
        if not (b.aux_coef or b.z_coef):
            return None
        even = scores.shape[1] / (self.chosen[layer].shape[1] * b.lengths.to(scores.dtype))  # times an even load: 1
        shares = scores / scores.sum(-1, keepdim=True)
        aux = ((self.shared[layer] * even[:, None])[b.owner] * shares).sum(-1)
        z = logits.logsumexp(-1).square()
        costs = torch.stack([torch.where(b.counted, each, 0.0).sum() for each in (aux, z)])
        self.costs[layer] = costs.detach()
        return b.weight * (b.aux_coef * costs[0] + b.z_coef * costs[1])

    def _note_loads(self, b: Balance, layer: int, experts: int) -> None:
        at = b.owner[:, None] * experts + self.chosen[layer]
        mine = count_rows(at.flatten(), len(b.lengths) * experts, b.counted[:, None].expand_as(at).flatten())
        self.loads[layer] = self.shared[layer] = mine.view(-1, experts)
        for axis in b.axes if b.aux_coef or b.z_coef else ():
            self.shared[layer] = sum_over(self.shared[layer], axis)
