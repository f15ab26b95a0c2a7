"""A mixture of experts whose first product gathers its rows and gates its results: forward no copies of tokens are made, and
silu(gate) up has no pass of its own. Importing this needs triton.

    gate and up   rows of x by source                [n, 2F] in pairs, and silu(gate) up [n, F]
    down          [n, F]                             [n, D]
    tokens        the weighted sum of their copies   [m, D]

Backward, the product with down's weight also gives the gates' gradient, the weights' and silu(gate) up again: x and the
pairs are all that is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import moe_triton, quack, reference
from dovetail.kernels.token_permute import rounded

BLOCK = 1024  # copies of a program


@dataclass(frozen=True)
class Products:
    """The grouped products, as `quack` has them."""

    gated_product_into: Any = quack.gated_product_into
    gated: Any = quack.gated
    gated_gradient: Any = quack.gated_gradient
    product: Any = quack.grouped_product
    input_gradient: Any = quack.input_gradient
    add_weight_grad_: Any = quack.add_grouped_grad_
    add_joint_grad_: Any = quack.add_grouped_joint_grad_


QUACK = Products()


def mixture(
    ops: Any,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: tuple[Tensor, Tensor],
    copies: int | None = None,
    add: Callable[..., None] | None = None,
    products: Products = QUACK,
) -> Tensor:
    """As `reference.mixture`, which takes what is not bfloat16, has odd widths or no rows at all.

    Handed over by `add`, a weight's gradient is rounded once, when the product adds it to its sum.
    """
    (gate_up, down), total = experts, chosen.numel() if copies is None else copies
    odd = any(n % quack.MULTIPLE for n in (*gate_up.shape[1:], *down.shape[1:]))
    if x.dtype != torch.bfloat16 or not total or odd or chosen.shape[1] > moe_triton.MOST_COPIES:
        return reference.mixture(ops, x, chosen, weights, experts, copies, add)
    rows, ends = moe_triton.sort_rows(chosen, len(gate_up))
    room = min(rounded(total), chosen.numel())  # quack plans anew for every shape, for a millisecond of the host
    how = rows, ends, room, products, add, torch.is_grad_enabled()
    y: Tensor = _Mixture.apply(x, weights, gate_up, down, how)
    return y


class _Mixture(torch.autograd.Function):
    """forward: y[t] = sum over its copies of w down(silu(gate) up). backward: x, w and both weights, each by one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, how: Any) -> Tensor:
        rows, ends, room, products, add, learns = how
        x, weights = x.contiguous(), weights.contiguous()
        source, scale = _by_row(rows, weights, room)
        starts = torch.nn.functional.pad(ends.to(torch.int32), (1, 0))
        if learns and any(ctx.needs_input_grad):
            half = x.new_empty(room, down.shape[2])
            both = products.gated_product_into(x, gate_up, half, starts, source)
            ctx.save_for_backward(x, gate_up, down, rows, starts, scale, both)
        else:
            half = products.gated(x, gate_up, starts, source)
        back = products.product(half, down, starts)
        ctx.products, ctx.add, ctx.shape = products, add, weights.shape
        return moe_triton.collect_rows(back, rows, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, gate_up, down, rows, starts, scale, both = ctx.saved_tensors
        products, (tokens, copies), room = ctx.products, ctx.shape, len(scale)
        for_x, for_weights, for_gate_up, for_down, _ = ctx.needs_input_grad
        moved = moe_triton.spread_rows(grads[0], rows, copies, room)  # both products take longer to gather them
        d_both, half, d_scale = products.gated_gradient(moved, down, both, starts, scale)
        d_down = d_gate_up = dx = d_weights = None
        if for_x:
            dx = moe_triton.collect_rows(products.input_gradient(d_both, gate_up, starts), rows, copies)
        if for_weights:
            d_weights = _by_copy(rows, d_scale).view(tokens, copies)
        if for_down:
            add = partial(products.add_weight_grad_, starts=starts)
            d_down = _handed_over(ctx.add, "down_proj", down, (moved, half), add)
        if for_gate_up:
            spread = partial(moe_triton.spread_rows, rows=rows, copies=copies, total=room)
            add = partial(_add_spread, spread, partial(products.add_joint_grad_, starts=starts))
            d_gate_up = _handed_over(ctx.add, "gate_up_proj", gate_up, (d_both, x), add)
        return dx, d_weights, d_gate_up, d_down, None


def _handed_over(
    to: Callable[..., None] | None, name: str, weight: Tensor, of: tuple[Tensor, Tensor], add: Callable[..., None]
) -> Tensor | None:
    """A weight's gradient, to who adds it, or as autograd wants it."""
    if to is not None:
        return to(name, *of, add)
    add(dw := torch.empty_like(weight), *of, first=True)
    return dw


def _add_spread(
    spread: Callable[[Tensor], Tensor], add: Callable[..., None], total: Tensor, dz: Tensor, x: Tensor, *, first: bool
) -> None:
    """The gradient of a product whose rows are copies of x: they are made when they are needed."""
    add(total, dz, spread(x), first=first)


def _by_row(rows: Tensor, weights: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Where each row comes from, int32 [total], and its weight, float32 [total]."""
    source = torch.empty(total, dtype=torch.int32, device=rows.device)
    scale = torch.empty(total, dtype=torch.float32, device=rows.device)
    grid = (triton.cdiv(len(rows), BLOCK),)
    _invert[grid](rows, weights, source, scale, len(rows), total, weights.shape[1], BLOCK)
    return source, scale


def _by_copy(rows: Tensor, x: Tensor) -> Tensor:
    """x [total] by row -> [len(rows)] by copy; 0 of copies that are nowhere."""
    found = torch.empty(len(rows), dtype=x.dtype, device=x.device)
    _pick[(triton.cdiv(len(rows), BLOCK),)](rows, x, found, len(rows), len(x), BLOCK)
    return found


@triton.jit(do_not_specialize=["n", "total"])
def _invert(
    rows: tl.tensor,
    weights: tl.tensor,
    source: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    total: tl.tensor,
    COPIES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + at, mask=at < n, other=total).to(tl.int64)
    there = (at < n) & (row < total)
    tl.store(source + row, (at // COPIES).to(tl.int32), mask=there)
    tl.store(scale + row, tl.load(weights + at, mask=there, other=0.0).to(tl.bfloat16).to(tl.float32), mask=there)


@triton.jit(do_not_specialize=["n", "total"])
def _pick(rows: tl.tensor, x: tl.tensor, found: tl.tensor, n: tl.tensor, total: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + at, mask=at < n, other=total).to(tl.int64)
    tl.store(found + at, tl.load(x + row, mask=(at < n) & (row < total), other=0.0), mask=at < n)
