"""A mixture of experts by quack's grouped products."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import moe_triton, quack
from dovetail.kernels.reference_experts import round_rows

BLOCK = 1024  # copies per program
AddGrad = Callable[..., None]


class _Plan(NamedTuple):
    """rows, ends: of `moe_triton.sort_rows`. size: rows of the products."""

    rows: Tensor
    ends: Tensor
    size: int
    products: Any
    add: AddGrad | None
    grad_enabled: bool


def mixture(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    matrices: tuple[Tensor, Tensor],
    copies: int | None = None,
    add: AddGrad | None = None,
    products: Any = quack,
) -> Tensor | None:
    """As `registry.mixture_of_experts`; None where unsupported."""
    (gate_up, down) = matrices
    total = experts.numel() if copies is None else copies
    odd = any(n % quack.MULTIPLE for n in (*gate_up.shape[1:], *down.shape[1:]))
    if x.dtype != torch.bfloat16 or not total or odd or experts.shape[1] > moe_triton.MAX_COPIES:
        return None
    rows, ends = moe_triton.sort_rows(experts, len(gate_up))
    size = min(round_rows(total), experts.numel())  # each new shape costs quack a millisecond
    return _Mixture.apply(
        x, weights, gate_up, down, _Plan(rows, ends, size, products, add, torch.is_grad_enabled())
    )


class _Mixture(torch.autograd.Function):
    """forward: y[t] = sum of w down(silu(gate) up). backward: dx, dw and both weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, plan: _Plan
    ) -> Tensor:
        rows = plan.rows
        products = plan.products
        x = x.contiguous()
        weights = weights.contiguous()
        source, scale = _by_row(rows, weights, plan.size)
        starts = torch.nn.functional.pad(plan.ends.to(torch.int32), (1, 0))
        if plan.grad_enabled and any(ctx.needs_input_grad):
            gated = x.new_empty(plan.size, down.shape[2])
            pairs = products.gated_product_into(x, gate_up, gated, starts, source)
            ctx.save_for_backward(x, gate_up, down, rows, starts, scale, pairs)
        else:
            gated = products.gated(x, gate_up, starts, source)
        y = products.grouped_product(gated, down, starts)
        ctx.products = products
        ctx.add = plan.add
        ctx.shape = weights.shape
        return moe_triton.unpermute_rows(y, rows, weights.shape[1], weights)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, gate_up, down, rows, starts, scale, pairs = ctx.saved_tensors
        products = ctx.products
        copies = ctx.shape[1]
        size = len(scale)
        for_x, for_weights, for_gate_up, for_down, _ = ctx.needs_input_grad
        dy = moe_triton.permute_rows(
            grads[0], rows, copies, size
        )  # faster than gathering in both products
        d_pairs, gated, d_scale = products.gated_gradient(dy, down, pairs, starts, scale)
        d_down = d_gate_up = dx = d_weights = None

        def add_gate_up(total: Tensor, dz: Tensor, x: Tensor, *, first: bool) -> None:
            permuted = moe_triton.permute_rows(x, rows, copies, size)
            products.add_grouped_joint_grad_(total, dz, permuted, starts=starts, first=first)

        if for_x:
            dx = moe_triton.unpermute_rows(
                products.input_gradient(d_pairs, gate_up, starts), rows, copies
            )
        if for_weights:
            d_weights = torch.empty(ctx.shape, dtype=d_scale.dtype, device=rows.device)
            _pick[(triton.cdiv(len(rows), BLOCK),)](
                rows, d_scale, d_weights, len(rows), size, BLOCK
            )
        if for_down:
            add_down = partial(products.add_grouped_grad_, starts=starts)
            d_down = _weight_grad(ctx.add, "down_proj", down, (dy, gated), add_down)
        if for_gate_up:
            d_gate_up = _weight_grad(ctx.add, "gate_up_proj", gate_up, (d_pairs, x), add_gate_up)
        return dx, d_weights, d_gate_up, d_down, None


def _weight_grad(
    take: AddGrad | None, name: str, weight: Tensor, factors: tuple[Tensor, Tensor], add: AddGrad
) -> Tensor | None:
    if take is not None:
        return take(name, *factors, add)
    add(dw := torch.empty_like(weight), *factors, first=True)
    return dw


def _by_row(rows: Tensor, weights: Tensor, total: int) -> tuple[Tensor, Tensor]:
    source = torch.empty(total, dtype=torch.int32, device=rows.device)
    scale = torch.empty(total, dtype=torch.float32, device=rows.device)
    grid = (triton.cdiv(len(rows), BLOCK),)
    _invert[grid](rows, weights, source, scale, len(rows), total, weights.shape[1], BLOCK)
    return source, scale


@triton.jit(do_not_specialize=["n", "size"])
def _invert(
    rows: tensor,
    weights: tensor,
    source: tensor,
    scale: tensor,
    n: tensor,
    size: tensor,
    K: constexpr,
    SIZE: constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + at, mask=at < n, other=size).to(tl.int64)
    valid = (at < n) & (row < size)
    tl.store(source + row, (at // K).to(tl.int32), mask=valid)
    tl.store(
        scale + row,
        tl.load(weights + at, mask=valid, other=0.0).to(tl.bfloat16).to(tl.float32),
        mask=valid,
    )


@triton.jit(do_not_specialize=["n", "total"])
def _pick(rows: tensor, x: tensor, out: tensor, n: tensor, total: tensor, SIZE: constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + at, mask=at < n, other=total).to(tl.int64)
    tl.store(out + at, tl.load(x + row, mask=(at < n) & (row < total), other=0.0), mask=at < n)
