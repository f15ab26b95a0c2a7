"""What sits on top of the trunk: log-probs and entropies (actor, reference), or values (critic)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats, is_separable
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import wide
from dovetail.kernels.registry import KernelSet
from dovetail.nn.embedding import vocab_placement
from dovetail.nn.fused_head import VocabShard, fused_loss, fused_token_stats
from dovetail.nn.grad_accumulation import Adder
from dovetail.parallel.collectives import all_gather, all_reduce, gather_replicated
from dovetail.parallel.mesh import Axis, Mesh
from dovetail.parallel.placement import Placement


class LMHead(Adder):
    """Hidden states [t, D] -> statistics or loss of the counted tokens, or logits.

    Gathers tokens (backward: reduce_scatter), splits the vocabulary; masked tokens are gone before the product.
    """

    def __init__(self, vocab_size: int, width: int, mesh: Mesh, kernels: KernelSet, *, tied: bool = False) -> None:
        super().__init__()
        self.axis, self.kernels = mesh["tp"], kernels
        rows, placement = vocab_placement(vocab_size, self.axis.size, tied=tied)
        self.first = self.axis.rank * rows
        self.columns = max(0, min(rows, vocab_size - self.first))
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}

    def forward(self, x: Tensor, micro: MicroBatch, loss: LossFn | None) -> TokenStats | Loss:
        """With a loss, that loss; without, the statistics [n] of the counted tokens."""
        counted = all_gather(x, self.axis)[micro.index]
        if loss is None:
            return fused_token_stats(counted, self.shard, micro.counted)
        return fused_loss(counted, self.shard, micro.counted, loss)

    def logits(self, x: Tensor) -> Tensor:
        """This rank's logits [n, columns], in the wide dtype, of hidden states [n, D] that every rank of the axis holds."""
        return self.kernels.logits(x, self.shard.weight).to(wide(x.dtype))

    @property
    def shard(self) -> VocabShard:
        weight = self.weight if self.columns == self.weight.shape[0] else self.weight[: self.columns]
        return VocabShard(weight, self.first, self.axis, self.kernels, self if self.adds else None)


class ValueHead(nn.Module):
    """Hidden states [t, D] -> values [T], in the wide dtype, equal on every rank of tp.

    Each rank computes its own tokens, so the parameters' gradients are partial. forward all_gather of [t] floats,
    backward this rank's slice.
    """

    def __init__(self, width: int, mesh: Mesh, *, bias: bool) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        self.weight = nn.Parameter(torch.empty(1, width))
        self.bias = nn.Parameter(torch.empty(1)) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor, micro: MicroBatch, loss: LossFn | None) -> Tensor | Loss:
        """With a loss, that loss of the counted tokens' values; without, the values [T] of all tokens."""
        values = gather_replicated(F.linear(x, self.weight, self.bias)[:, 0].to(wide(x.dtype)), self.axis)
        return values if loss is None else loss(values[micro.index], micro.counted)


@dataclass(frozen=True)
class SequenceGather:
    """A loss that needs whole sequences, computed by every cp rank from what all of them have.

    Each rank's gradient is that of its own tokens; the value is told once, by the first. forward all_reduce of [n] for
    each of the loss's inputs, backward none.
    """

    loss: LossFn
    micro: MicroBatch
    axis: Axis
    separable: ClassVar[bool] = False

    def __call__(self, stats: TokenStats | Tensor, _: PackedBatch, /) -> Loss:
        whole = self._spread(stats) if isinstance(stats, Tensor) else TokenStats(*map(self._spread, stats))
        total, count, metrics = self.loss(whole, self.micro.all_counted)
        if self.axis.rank == 0:
            return Loss(total, count, metrics)
        nothing = {name: Sum(0 * s.total, 0 * s.count) for name, s in metrics.items()}
        return Loss(total - total.detach(), 0 * count, nothing)

    def _spread(self, x: Tensor) -> Tensor:
        """[n] of this rank's counted tokens -> those of all cp ranks, in the batch's order."""
        everyone = x.new_zeros(len(self.micro.all_counted))
        return all_reduce(everyone.index_copy(0, self.micro.local, x), self.axis)


def shared(loss: LossFn, micro: MicroBatch, axis: Axis) -> LossFn:
    """`loss` as one rank of cp computes it."""
    return loss if axis.size == 1 or is_separable(loss) else SequenceGather(loss, micro, axis)
