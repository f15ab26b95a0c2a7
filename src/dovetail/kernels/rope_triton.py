"""QKV split, QK-norm and RoPE in one pass each way as Triton kernels. A row is a head of a token."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import reference
from dovetail.kernels.norm_triton import EXACT, MAX_WIDTH, column_sums, supported, tile_for

PROGRAMS = 512  # of a gain's gradient
Gains = tuple[Tensor, Tensor]


class Shape(NamedTuple):
    """Query heads, KV heads, half of the rotary dim."""

    queries: int
    groups: int
    half: int


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not supported(x, cos) or x.shape[-1] > MAX_WIDTH:
        return reference.rope(x, cos, sin)
    return _Heads.apply(x, (x.shape[1], 0), cos, sin, None, None, 0.0)[0]


def heads(
    qkv: Tensor,
    counts: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
    gains: Gains | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    split = qkv.unflatten(-1, (counts[0] + 2 * counts[1], -1))
    if (
        not all(supported(split, other) for other in (cos, *(gains or ())))
        or split.shape[-1] > MAX_WIDTH
    ):
        return reference.heads(qkv, counts, cos, sin, gains, eps)
    return _Heads.apply(split, counts, cos, sin, *(gains or (None, None)), eps)


class _Heads(torch.autograd.Function):
    """forward: [T, H + 2 G, C] -> q, k (normed, rotated) and v (a view). backward: one joint gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        counts: tuple[int, int],
        cos: Tensor,
        sin: Tensor,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x if x.stride(2) == 1 else x.contiguous()
        cos = cos.contiguous()
        sin = sin.contiguous()
        tokens = len(x)
        rotated = sum(counts)
        tile, warps = tile_for(x.shape[2])
        q, k = (x.new_empty((tokens, count, x.shape[2])) for count in counts)
        inverse = None if q_gain is None else x.new_empty(tokens * rotated, dtype=torch.float32)
        inputs = (x, cos, sin, q_gain, k_gain)
        outputs = (q, k, inverse)
        shape = Shape(*counts, cos.shape[1])
        grid = (triton.cdiv(tokens * rotated, tile.rows),)
        strides = (x.stride(0), x.stride(1))
        _rotate[grid](inputs, outputs, tokens, strides, eps, shape, tile, num_warps=warps, **EXACT)
        ctx.save_for_backward(cos, sin, *(() if inverse is None else (x, q_gain, k_gain, inverse)))
        ctx.sizes = shape
        ctx.shape = x.shape
        return q, k, x[:, rotated:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *norm = ctx.saved_tensors
        x, q_gain, k_gain, inverse = norm or (None, None, None, None)
        dq, dk, dv = (_dense_heads(g) for g in grads)
        tokens, all_heads, channels = ctx.shape
        tile, warps = tile_for(channels)
        tiles = triton.cdiv(tokens * all_heads, tile.rows)
        programs = tiles if x is None else min(PROGRAMS, tiles)
        dx = dq.new_empty(ctx.shape)
        partial = None if x is None else x.new_empty((programs, 2, channels), dtype=torch.float32)
        inputs = (dq, dk, dv, cos, sin)
        strides = tuple(g.stride(0) for g in (dq, dk, dv))
        norm_inputs = (x, q_gain, k_gain, inverse, *((0, 0) if x is None else x.stride()[:2]))
        options = {"num_warps": warps, **EXACT}
        _rotate_grad[(programs,)](
            inputs, norm_inputs, (dx, partial), tokens, strides, ctx.sizes, tile, **options
        )
        d_gains = (None, None) if partial is None else column_sums(partial, dx.dtype).unbind()
        return dx, None, None, None, *d_gains, None


def _dense_heads(x: Tensor) -> Tensor:
    return (
        x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] <= 1) else x.contiguous()
    )


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    inputs: tensor,
    outputs: tensor,
    tokens: tensor,
    strides: tensor,
    eps: tensor,
    SHAPE: constexpr,
    TILE: constexpr,
) -> None:
    HEADS: constexpr = SHAPE.queries + SHAPE.groups
    x, cos, sin, q_gain, k_gain = inputs
    q, k, inverse = outputs
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    live = row < tokens.to(tl.int64) * HEADS
    token = row // HEADS
    head = row % HEADS
    at = tl.arange(0, TILE.columns)
    rotary = at < 2 * SHAPE.half
    angle = tl.where(at < SHAPE.half, at, at - SHAPE.half)
    other = tl.where(at < SHAPE.half, at + SHAPE.half, at - SHAPE.half)
    mask = live[:, None] & (at < TILE.width)[None, :]
    both = live[:, None] & rotary[None, :]
    base = x + (token * strides[0] + head * strides[1])[:, None]
    a = tl.load(base + at[None, :], mask=mask, other=0.0)
    b = tl.load(base + other[None, :], mask=both, other=0.0)
    table = token[:, None] * SHAPE.half + angle[None, :]
    c = tl.load(cos + table, mask=both, other=1.0).to(tl.float32)
    s = tl.load(sin + table, mask=both, other=0.0).to(tl.float32)
    dtype = a.dtype
    if q_gain is not None:
        wide = a.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / TILE.width + eps)
        tl.store(inverse + row, scale, mask=live)
        w = _gain(q_gain, k_gain, at, at < TILE.width, head < SHAPE.queries)
        w_other = _gain(q_gain, k_gain, other, rotary, head < SHAPE.queries)
        a = ((wide * scale[:, None]).to(dtype).to(tl.float32) * w).to(dtype)
        b = ((b.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32) * w_other).to(dtype)
    near = (a.to(tl.float32) * c).to(dtype).to(tl.float32)
    far = (b.to(tl.float32) * s).to(dtype).to(tl.float32)
    rotated = tl.where((at < SHAPE.half)[None, :], near - far, near + far).to(dtype)
    to_q = q + (token * SHAPE.queries + head) * TILE.width
    to_k = k + (token * SHAPE.groups + head - SHAPE.queries) * TILE.width
    out = tl.where(head < SHAPE.queries, to_q, to_k)[:, None] + at[None, :]
    tl.store(out, tl.where(rotary[None, :], rotated, a), mask=mask)


@triton.jit
def _gain(q_gain: tensor, k_gain: tensor, at: tensor, inside: tensor, of_query: tensor) -> tensor:
    of_q = tl.load(q_gain + at, mask=inside, other=0.0).to(tl.float32)
    of_k = tl.load(k_gain + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(of_query[:, None], of_q[None, :], of_k[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _rotate_grad(
    inputs: tensor,
    norm: tensor,
    outputs: tensor,
    tokens: tensor,
    strides: tensor,
    SHAPE: constexpr,
    TILE: constexpr,
) -> None:
    ROTATED: constexpr = SHAPE.queries + SHAPE.groups
    HEADS: constexpr = SHAPE.queries + 2 * SHAPE.groups
    dq, dk, dv, cos, sin = inputs
    x, q_gain, k_gain, inverse, x_stride, head_stride = norm
    dx, partial = outputs
    at = tl.arange(0, TILE.columns)
    rotary = at < 2 * SHAPE.half
    angle = tl.where(at < SHAPE.half, at, at - SHAPE.half)
    other = tl.where(at < SHAPE.half, at + SHAPE.half, at - SHAPE.half)
    ROWS: constexpr = TILE.rows
    COLUMNS: constexpr = TILE.columns
    dw_q = tl.zeros((ROWS, COLUMNS), tl.float32)
    dw_k = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(0) * TILE.rows
    while first < tokens * HEADS:
        row = first + tl.arange(0, TILE.rows)
        live = row < tokens * HEADS
        token = (row // HEADS).to(tl.int64)
        head = row % HEADS
        of_query = head < SHAPE.queries
        of_value = head >= ROTATED
        mask = live[:, None] & (at < TILE.width)[None, :]
        both = (live & (head < ROTATED))[:, None] & rotary[None, :]
        from_q = dq + (token * strides[0] + head * TILE.width)
        from_k = dk + (token * strides[1] + (head - SHAPE.queries) * TILE.width)
        from_v = dv + (token * strides[2] + (head - ROTATED) * TILE.width)
        base = tl.where(of_query, from_q, tl.where(of_value, from_v, from_k))[:, None]
        g = tl.load(base + at[None, :], mask=mask, other=0.0)
        h = tl.load(base + other[None, :], mask=both, other=0.0)
        table = token[:, None] * SHAPE.half + angle[None, :]
        c = tl.load(cos + table, mask=both, other=1.0).to(tl.float32)
        s = tl.load(sin + table, mask=both, other=0.0).to(tl.float32)
        dtype = g.dtype
        near = (g.to(tl.float32) * c).to(dtype).to(tl.float32)
        far = (h.to(tl.float32) * s).to(dtype).to(tl.float32)
        d = tl.where((at < SHAPE.half)[None, :], near + far, near - far).to(dtype).to(tl.float32)
        if q_gain is not None:
            normed = live & (head < ROTATED)
            a = tl.load(
                x + (token * x_stride + head * head_stride)[:, None] + at[None, :],
                mask=mask,
                other=0.0,
            )
            scale = tl.load(inverse + token * ROTATED + head, mask=normed, other=0.0)[:, None]
            n = a.to(tl.float32) * scale
            rounded = n.to(dtype).to(tl.float32)
            dw_q += tl.where(of_query[:, None], d * rounded, 0.0)
            dw_k += tl.where(of_query[:, None], 0.0, d * rounded)
            dn = d * _gain(q_gain, k_gain, at, at < TILE.width, of_query)
            d = tl.where(
                of_value[:, None], d, (dn - n * (tl.sum(dn * n, 1) / TILE.width)[:, None]) * scale
            )
        tl.store(dx + row.to(tl.int64)[:, None] * TILE.width + at[None, :], d.to(dtype), mask=mask)
        first += tl.num_programs(0) * TILE.rows
    if q_gain is not None:
        sums = partial + tl.program_id(0) * 2 * TILE.width + at
        tl.store(sums, tl.sum(dw_q, 0), mask=at < TILE.width)
        tl.store(sums + TILE.width, tl.sum(dw_k, 0), mask=at < TILE.width)
