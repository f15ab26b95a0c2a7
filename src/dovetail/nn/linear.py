"""Linear layers cut over the tensor-parallel axis. Between blocks tokens are cut, inside them features are.

ColumnLinear   forward  y = all_gather(x) w.T       [t, D] -> [T, out / tp]
               backward dx = reduce_scatter(dy w)
RowLinear      forward  y = reduce_scatter(x w.T)   [T, in / tp] -> [t, D]
               backward dx = all_gather(dy) w
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.comm import all_gather, reduce_scatter
from dovetail.mesh import Mesh
from dovetail.placement import Part, Placement, Split


class ColumnLinear(nn.Module):
    """[t, D] -> one [T, out_i / tp] for every part. Gathers tokens, splits output features.

    `parts` maps checkpoint names to (number of units, unit length): heads are never cut through. Fewer units than
    ranks: neighboring ranks hold copies of one unit.
    forward all_gather, backward reduce_scatter.
    """

    def __init__(self, width: int, parts: dict[str, tuple[int, int]], mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        tp = self.axis.size
        cut = []
        for name, (units, length) in parts.items():
            assert units % tp == 0 or tp % units == 0, f"{name}: {units} units over tp={tp}; arch refuses this"
            cut.append(Part(name, units * length, copies=max(1, tp // units)))
        self.lengths = [part.local_length(tp) for part in cut]
        self.weight = nn.Parameter(torch.empty(sum(self.lengths), width))
        self.bias = nn.Parameter(torch.empty(sum(self.lengths))) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement((Split(0, "tp", tuple(cut)),)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(all_gather(x, self.axis), self.weight, self.bias).split(self.lengths, dim=-1)


class RowLinear(nn.Module):
    """[T, in / tp] -> [t, D]. Splits input features, sums over ranks and scatters tokens.

    The bias is added once, to this rank's tokens, so its gradient is partial.
    forward reduce_scatter, backward all_gather.
    """

    def __init__(self, in_features: int, width: int, mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        self.weight = nn.Parameter(torch.empty(width, in_features // self.axis.size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.placements = {
            "weight": Placement((Split(1, "tp", (Part("", in_features),)),)),
            "bias": Placement(partial_over=("tp",)),
        }

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_scatter(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias
