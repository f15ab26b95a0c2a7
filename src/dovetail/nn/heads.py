"""Heads: log-probs and entropies, or values."""

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
from dovetail.nn.grad_accumulation import GradAccumulator
from dovetail.parallel.collectives import all_gather, all_reduce, gather_replicated
from dovetail.parallel.mesh import Axis, Mesh
from dovetail.parallel.placement import Placement


class LMHead(GradAccumulator):
    """Hidden states [t, D] -> statistics or loss of the counted tokens. forward all_gather, backward reduce_scatter."""

    def __init__(self, vocab_size: int, width: int, mesh: Mesh, kernels: KernelSet, *, tied: bool = False) -> None:
        super().__init__()
        self.axis, self.kernels = mesh["tp"], kernels
        rows, placement = vocab_placement(vocab_size, self.axis.size, tied=tied)
        self.first = self.axis.rank * rows
        self.columns = max(0, min(rows, vocab_size - self.first))
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}

    def forward(self, x: Tensor, micro: MicroBatch, loss: LossFn | None) -> TokenStats | Loss:
        counted = all_gather(x, self.axis)[micro.index]
        if loss is None:
            return fused_token_stats(counted, self.shard, micro.counted)
        return fused_loss(counted, self.shard, micro.counted, loss)

    def logits(self, x: Tensor) -> Tensor:
        """This rank's logits [n, columns] in the wide dtype, of hidden states x [n, D] that all ranks of tp hold."""
        return self.kernels.logits(x, self.shard.weight).to(wide(x.dtype))

    @property
    def shard(self) -> VocabShard:
        weight = self.weight if self.columns == self.weight.shape[0] else self.weight[: self.columns]
        return VocabShard(weight, self.first, self.axis, self.kernels, None if self.wgrad_queue is None else self)


class ValueHead(nn.Module):
    """Hidden states [t, D] -> values [T] in the wide dtype. Each rank computes its own tokens, so gradients are partial.

    forward all_gather of [t], backward a slice.
    """

    def __init__(self, width: int, mesh: Mesh, *, bias: bool) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        self.weight = nn.Parameter(torch.empty(1, width))
        self.bias = nn.Parameter(torch.empty(1)) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor, micro: MicroBatch, loss: LossFn | None) -> Tensor | Loss:
        """Values of all tokens, or the loss of those of the counted tokens."""
        values = gather_replicated(F.linear(x, self.weight, self.bias)[:, 0].to(wide(x.dtype)), self.axis)
        return values if loss is None else loss(values[micro.index], micro.counted)


@dataclass(frozen=True)
class SequenceGather:
    """A loss of whole sequences, computed by every cp rank; only the first returns its value.

    forward all_reduce of each input [n], backward none: each rank's gradient is that of its own tokens.
    """

    loss: LossFn
    micro: MicroBatch
    axis: Axis
    separable: ClassVar[bool] = False

    def __call__(self, stats: TokenStats | Tensor, _: PackedBatch, /) -> Loss:
        whole = self._gather(stats) if isinstance(stats, Tensor) else TokenStats(*map(self._gather, stats))
        total, count, metrics = self.loss(whole, self.micro.all_counted)
        if self.axis.rank == 0:
            return Loss(total, count, metrics)
        zeros = {name: Sum(0 * s.total, 0 * s.count) for name, s in metrics.items()}
        return Loss(total - total.detach(), 0 * count, zeros)

    def _gather(self, x: Tensor) -> Tensor:
        """Of this rank's counted tokens -> of all ranks', in the batch's order."""
        whole = x.new_zeros(len(self.micro.all_counted))
        return all_reduce(whole.index_copy(0, self.micro.local, x), self.axis)


def shared(loss: LossFn, micro: MicroBatch, axis: Axis) -> LossFn:
    """`loss` as a rank of cp computes it."""
    return loss if axis.size == 1 or is_separable(loss) else SequenceGather(loss, micro, axis)
