"""The token table, cut over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.comm import reduce_scatter
from dovetail.gradients import Adder
from dovetail.mesh import Mesh
from dovetail.placement import Part, Placement, Split


def vocab_placement(vocab_size: int, tp: int, *, tied: bool) -> tuple[int, Placement]:
    """(rows a rank, placement) of a [V, D] table: V is padded to a multiple of tp, at the end.

    A tied one is held at both ends of a pipeline, of which each sees one of its two uses.
    """
    rows = -(-vocab_size // tp)
    part = Part("", vocab_size, padding=rows * tp - vocab_size)
    return rows, Placement((Split(0, "tp", (part,)),), partial_over=("ends",) if tied else ())


class VocabEmbedding(Adder):
    """[T] -> [t, D]. Each rank looks up the ids whose rows it holds.

    forward reduce_scatter, backward all_gather.
    """

    def __init__(self, vocab_size: int, width: int, mesh: Mesh, *, tied: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        rows, placement = vocab_placement(vocab_size, self.axis.size, tied=tied)
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return F.embedding(tokens, self.summed("weight"))
        rows = self.weight.shape[0]
        local = tokens - self.axis.rank * rows
        mine = (local >= 0) & (local < rows)
        found = F.embedding(torch.where(mine, local, 0), self.summed("weight")) * mine[:, None]
        return reduce_scatter(found, self.axis)
