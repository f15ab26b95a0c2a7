"""The token embedding, sharded over the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.nn.grad_accumulation import GradAccumulator, accumulate_rows
from dovetail.parallel.collectives import reduce_scatter
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Part, Placement, Split


def vocab_placement(vocab_size: int, tp: int, *, tied: bool) -> tuple[int, Placement]:
    """(rows a rank, placement) of a [V, D] table, padded to a multiple of tp."""
    part = Part.padded("", vocab_size, tp)
    return part.local_length(tp), Placement((Split(0, "tp", (part,)),), partial_over=("ends",) if tied else ())


class VocabEmbedding(GradAccumulator):
    """[T] -> [t, D]. `pad` gets no gradient. forward reduce_scatter, backward all_gather."""

    def __init__(self, vocab_size: int, width: int, mesh: Mesh, *, tied: bool = False, pad: int | None = None) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        rows, placement = vocab_placement(vocab_size, self.axis.size, tied=tied)
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}
        own = pad is not None and pad // rows == self.axis.rank
        self.pad = pad % rows if pad is not None and own else None  # among this rank's rows

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self._lookup(tokens)
        rows = self.weight.shape[0]
        local = tokens - self.axis.rank * rows
        own = (local >= 0) & (local < rows)
        # Others' tokens look up different rows: adding many gradients to one row would be slow, though they are 0.
        anywhere = torch.arange(len(tokens), device=tokens.device) % rows
        return reduce_scatter(self._lookup(torch.where(own, local, anywhere)) * own[:, None], self.axis)

    def _lookup(self, ids: Tensor) -> Tensor:
        if self.wgrad_queue is None or not (self.weight.requires_grad and torch.is_grad_enabled()):
            return F.embedding(ids, self.weight, self.pad)
        out: Tensor = _Lookup.apply(ids, self.weight, self)
        return out


class _Lookup(torch.autograd.Function):
    """forward: rows of the table. backward: accumulates their gradients."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, table: VocabEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,), rows, pad = ctx.saved_tensors, grads[0], ctx.table.pad
        rows = rows if pad is None else rows.masked_fill((ids == pad)[:, None], 0.0)
        accumulate_rows(ctx.table.weight, rows, ids)
        return None, None, None
