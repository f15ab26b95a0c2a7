"""The matrix products of a layer with its weights."""

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar, NamedTuple

from torch import Tensor

from dovetail.kernels.registry import KernelSet

AddWeightGrad = Callable[..., None]  # `kernels.reference.add_weight_grad_`
# `nn.layers.accumulate_product`: of a weight, dy and x
AccumulateGrad = Callable[[Tensor, Tensor, Tensor, AddWeightGrad], None]


class Products:
    """The products of one layer with its weights, and their gradients.

    A layer multiplies by its weights through this object alone, so an adapter or another
    precision is a subclass. Each layer has its own.
    """

    # Whether kernels may join a product with what surrounds it: the gated activation, the
    # permutation of tokens to experts, the head's statistics. False in a subclass that changes
    # a product: the layer then calls the methods below.
    fused: ClassVar[bool] = True

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels
        self.gated = kernels.gated if self.fused else None
        self.mixture = kernels.mixture if self.fused else None
        self.head = kernels.head if self.fused else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] @ weight [N, K].T + bias [N], called without autograd."""
        return self.kernels.linear(x, weight, bias)

    def input_grad(self, dy: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """dy [T, N] @ weight [N, K], written to `out` where it is given."""
        return self.kernels.linear_input_grad(dy, weight, out)

    def add_weight_grad_(self, total: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
        """total [N, K] += dy [T, N].T @ x [T, K]; first: total is uninitialized, overwrite it."""
        self.kernels.add_weight_grad_(total, dy, x, first=first)

    @property
    def trains_adapters(self) -> bool:
        """Whether the layer has parameters besides its weight and bias, with gradients of their own."""
        return False

    def add_adapter_grads(self, accumulate: AccumulateGrad, dy: Tensor, x: Tensor) -> None:
        """Pass the gradients of the layer's adapters to `accumulate`, as products dy.T @ x."""

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, D] @ weight [V, D].T in new memory; float32 where the kernels keep it so."""
        return self.kernels.logits(x, weight)

    def grouped(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x [n, K], in order of experts, @ weight [E, N, K].T -> [n, N], with autograd.

        ends: int [E], where each expert's rows end.
        """
        return self.kernels.grouped_mm(x, weight.transpose(1, 2), ends)

    def mixture_of_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        matrices: tuple[Tensor, Tensor],
        copies: int | None = None,
        add: AddWeightGrad | None = None,
    ) -> Tensor:
        """Each token's sum of weight x down_e(swiglu(gate_up_e x)) over its experts, with autograd.

        x [n, D], experts int [n, K], weights [n, K] -> [n, D]. matrices: gate_up [E, 2 F, D] and
        down [E, D, F]. copies: how many of `experts` are below E; default: all. add: takes the
        weights' gradients, as `GradAccumulator.defer_wgrad`; default: autograd returns them.
        """
        if self.mixture is not None:
            y = self.mixture(x, experts, weights, matrices, copies, add)
            if y is not None:
                return y
        kernels = self.kernels
        gate_up, down = matrices
        permuted, rows, ends = kernels.permute(x, experts, len(gate_up), copies)
        hidden = kernels.swiglu(self.grouped(permuted, gate_up, ends))
        return kernels.unpermute(self.grouped(hidden, down, ends), rows, weights)


class GateUpGradients(NamedTuple):
    """The gradients of a gate-up product that applied the activation too, as those of `Products`.

    kernels: the module `KernelSet.gated`. Columns of dy are pairs: gate and up of each feature.
    """

    kernels: ModuleType

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.input_gradient(dy, weight)

    def add_weight_grad_(self, total: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
        self.kernels.add_joint_grad_(total, dy, x, first=first)
