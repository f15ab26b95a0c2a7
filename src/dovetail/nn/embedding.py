"""The token table, cut over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.comm import reduce_scatter
from dovetail.mesh import Mesh
from dovetail.placement import Part, Placement, Split


def vocab_placement(vocab_size: int, tp: int) -> tuple[int, Placement]:
    """(rows a rank, placement) of a [V, D] table: V is padded to a multiple of tp, at the end."""
    rows = -(-vocab_size // tp)
    part = Part("", vocab_size, padding=rows * tp - vocab_size)
    return rows, Placement((Split(0, "tp", (part,)),))


class VocabEmbedding(nn.Module):
    """[T] -> [t, D]. Each rank looks up the ids whose rows it holds.

    forward reduce_scatter, backward all_gather.
    """

    def __init__(self, vocab_size: int, width: int, mesh: Mesh) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        rows, placement = vocab_placement(vocab_size, self.axis.size)
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.axis.rank * rows
        mine = (local >= 0) & (local < rows)
        found = F.embedding(torch.where(mine, local, 0), self.weight) * mine[:, None]
        return reduce_scatter(found, self.axis)
