"""The token table, cut over the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.nn.grad_accumulation import Adder, add_rows
from dovetail.parallel.collectives import reduce_scatter
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Part, Placement, Split


def vocab_placement(vocab_size: int, tp: int, *, tied: bool) -> tuple[int, Placement]:
    """(rows a rank, placement) of a [V, D] table: V is padded to a multiple of tp, at the end.

    A tied one is held at both ends of a pipeline, of which each sees one of its two uses.
    """
    part = Part.padded("", vocab_size, tp)
    return part.local_length(tp), Placement((Split(0, "tp", (part,)),), partial_over=("ends",) if tied else ())


class VocabEmbedding(Adder):
    """[T] -> [t, D]. Each rank looks up the ids whose rows it holds; the row of `pad` learns nothing from that.

    forward reduce_scatter, backward all_gather.
    """

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
            return self._rows(tokens)
        rows = self.weight.shape[0]
        local = tokens - self.axis.rank * rows
        mine = (local >= 0) & (local < rows)
        # The others' tokens take any rows, and not all the same one: their gradients, all 0, are added one by one.
        anywhere = torch.arange(len(tokens), device=tokens.device) % rows
        return reduce_scatter(self._rows(torch.where(mine, local, anywhere)) * mine[:, None], self.axis)

    def _rows(self, at: Tensor) -> Tensor:
        if self.adds is None or not (self.weight.requires_grad and torch.is_grad_enabled()):
            return F.embedding(at, self.weight, self.pad)
        found: Tensor = _Lookup.apply(at, self.weight, self)
        return found


class _Lookup(torch.autograd.Function):
    """forward: some rows of the table. backward: their gradients are added where they lie. No collectives."""

    @staticmethod
    def forward(ctx: Any, at: Tensor, weight: Tensor, table: VocabEmbedding) -> Tensor:
        ctx.save_for_backward(at)
        ctx.table = table
        return F.embedding(at, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (at,), rows, pad = ctx.saved_tensors, grads[0], ctx.table.pad
        add_rows(ctx.table.weight, rows if pad is None else rows.masked_fill((at == pad)[:, None], 0.0), at)
        return None, None, None
