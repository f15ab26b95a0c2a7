"""Weights of experts, whose gradients their module adds where they lie."""

from torch import Tensor, nn

from dovetail.gradients import Adder
from dovetail.kernels import reference


class Held(Adder):
    """gate_up [E, 2F, D] and down [E, D, F]; sums in the wide dtype."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(x.detach().clone()) for x in (gate_up, down))
        self.gate_up_proj.grad_dtype = self.down_proj.grad_dtype = reference.wide(down.dtype)
        self.adds = reference.add_weight_grad_

    def both(self) -> tuple[Tensor, Tensor]:
        """As a mixture takes them."""
        return self.summed("gate_up_proj"), self.summed("down_proj")

    def sums(self) -> dict[str, Tensor]:
        """The gradients, by name."""
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
