"""Heads out of the joint product of attention as Triton kernels: cut, normed and turned in one pass, one joint gradient back.

A row is one head of one token; a program takes several. Values are no more than a view on the way in, and on the way back
their gradient is copied beside the others'. Importing this needs triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import reference
from dovetail.kernels.norm_triton import EXACT, WIDEST, column_sums, taken, tile

PROGRAMS = 512  # that share the heads of a gain's gradient


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `reference.rope`, in one pass, whatever lies between the heads."""
    if not taken(x, cos) or x.shape[-1] > WIDEST:
        return reference.rope(x, cos, sin)
    turned: Tensor = _Heads.apply(x, (x.shape[1], 0), cos, sin, None, None, 0.0)[0]
    return turned


def heads(
    qkv: Tensor,
    counts: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.heads`: queries and keys in one pass, values where they are, and one joint gradient in one pass."""
    cut = qkv.unflatten(-1, (counts[0] + 2 * counts[1], -1))
    if not all(taken(cut, other) for other in (cos, *(gains or ()))) or cut.shape[-1] > WIDEST:
        return reference.heads(qkv, counts, cos, sin, gains, eps)
    q, k, v = _Heads.apply(cut, counts, cos, sin, *(gains or (None, None)), eps)
    return q, k, v


class _Heads(torch.autograd.Function):
    """forward: heads [T, H + 2 G, C] to q and k, normed and turned, beside v, a view. backward: one joint gradient."""

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
        x, cos, sin = x if x.stride(2) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
        tokens, turned = len(x), sum(counts)
        size, warps = tile(x.shape[2])
        q, k = (x.new_empty((tokens, count, x.shape[2])) for count in counts)
        inverse = None if q_gain is None else x.new_empty(tokens * turned, dtype=torch.float32)
        given, model = (x, cos, sin, q_gain, k_gain), (*counts, cos.shape[1])
        grid = (triton.cdiv(tokens * turned, size[1]),)
        strides = (x.stride(0), x.stride(1))
        _turn[grid](given, (q, k, inverse), tokens, strides, eps, model, size, num_warps=warps, **EXACT)
        ctx.save_for_backward(cos, sin, *(() if inverse is None else (x, q_gain, k_gain, inverse)))
        ctx.counts, ctx.shape = counts, x.shape
        return q, k, x[:, turned:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *normed = ctx.saved_tensors
        x, q_gain, k_gain, inverse = normed or (None, None, None, None)
        dq, dk, dv = (_dense_heads(g) for g in grads)
        tokens, all_heads, channels = ctx.shape
        size, warps = tile(channels)
        tiles = triton.cdiv(tokens * all_heads, size[1])
        programs = tiles if x is None else min(PROGRAMS, tiles)
        dx = dq.new_empty(ctx.shape)
        found = None if x is None else x.new_empty((programs, 2, channels), dtype=torch.float32)
        given, strides = (dq, dk, dv, cos, sin), tuple(g.stride(0) for g in (dq, dk, dv))
        of_norm = (x, q_gain, k_gain, inverse, *((0, 0) if x is None else x.stride()[:2]))
        model = (*ctx.counts, cos.shape[1])
        _turn_grad[(programs,)](given, of_norm, (dx, found), tokens, strides, model, size, num_warps=warps, **EXACT)
        gains = (None, None) if found is None else column_sums(found, dx.dtype).unbind()
        return dx, None, None, None, *gains, None


def _dense_heads(x: Tensor) -> Tensor:
    """[T, H, C] with the heads of a token one after the other."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] <= 1) else x.contiguous()


@triton.jit(do_not_specialize=["tokens"])
def _turn(
    given: tl.tensor,
    made: tl.tensor,
    tokens: tl.tensor,
    strides: tl.tensor,
    eps: tl.tensor,
    MODEL: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Some heads of queries and keys. A channel and the one that it turns with are read apart: the second time from cache.

    What a head's second half adds, its first half takes away: the sine changes its sign with the half.
    """
    width: tl.constexpr = SIZE[0]
    ROWS: tl.constexpr = SIZE[1]
    COLUMNS: tl.constexpr = SIZE[2]
    HEADS: tl.constexpr = MODEL[0] + MODEL[1]
    HALF: tl.constexpr = MODEL[2]
    x, cos, sin, q_gain, k_gain = given
    q, k, inverse = made
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tokens.to(tl.int64) * HEADS
    token, head = row // HEADS, row % HEADS
    at = tl.arange(0, COLUMNS)
    turns = at < 2 * HALF
    angle = tl.where(at < HALF, at, at - HALF)
    other = tl.where(at < HALF, at + HALF, at - HALF)
    mask, both = live[:, None] & (at < width)[None, :], live[:, None] & turns[None, :]
    base = x + (token * strides[0] + head * strides[1])[:, None]
    a = tl.load(base + at[None, :], mask=mask, other=0.0)
    b = tl.load(base + other[None, :], mask=both, other=0.0)
    table = token[:, None] * HALF + angle[None, :]
    c = tl.load(cos + table, mask=both, other=1.0).to(tl.float32)
    s = tl.load(sin + table, mask=both, other=0.0).to(tl.float32)
    dtype = a.dtype
    if q_gain is not None:
        wide = a.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
        tl.store(inverse + row, scale, mask=live)
        w = _gain(q_gain, k_gain, at, at < width, head < MODEL[0])
        w_other = _gain(q_gain, k_gain, other, turns, head < MODEL[0])
        a = ((wide * scale[:, None]).to(dtype).to(tl.float32) * w).to(dtype)
        b = ((b.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32) * w_other).to(dtype)
    near, far = (a.to(tl.float32) * c).to(dtype).to(tl.float32), (b.to(tl.float32) * s).to(dtype).to(tl.float32)
    turned = tl.where((at < HALF)[None, :], near - far, near + far).to(dtype)
    to_q = q + (token * MODEL[0] + head) * width
    to_k = k + (token * MODEL[1] + head - MODEL[0]) * width
    out = tl.where(head < MODEL[0], to_q, to_k)[:, None] + at[None, :]
    tl.store(out, tl.where(turns[None, :], turned, a), mask=mask)


@triton.jit
def _gain(q_gain: tl.tensor, k_gain: tl.tensor, at: tl.tensor, inside: tl.tensor, of_query: tl.tensor) -> tl.tensor:
    """Each row's gain [rows, columns]: queries have one, keys another."""
    of_q = tl.load(q_gain + at, mask=inside, other=0.0).to(tl.float32)
    of_k = tl.load(k_gain + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(of_query[:, None], of_q[None, :], of_k[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _turn_grad(
    given: tl.tensor,
    of_norm: tl.tensor,
    made: tl.tensor,
    tokens: tl.tensor,
    strides: tl.tensor,
    MODEL: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Every so manieth tile of heads: turned back and through the norm, or a value's as it is; and the gains' sums."""
    width: tl.constexpr = SIZE[0]
    ROWS: tl.constexpr = SIZE[1]
    COLUMNS: tl.constexpr = SIZE[2]
    QUERIES: tl.constexpr = MODEL[0]
    TURNED: tl.constexpr = MODEL[0] + MODEL[1]
    HEADS: tl.constexpr = MODEL[0] + 2 * MODEL[1]
    HALF: tl.constexpr = MODEL[2]
    dq, dk, dv, cos, sin = given
    x, q_gain, k_gain, inverse, x_stride, head_stride = of_norm
    dx, found = made
    at = tl.arange(0, COLUMNS)
    turns = at < 2 * HALF
    angle = tl.where(at < HALF, at, at - HALF)
    other = tl.where(at < HALF, at + HALF, at - HALF)
    dw_q = tl.zeros((ROWS, COLUMNS), tl.float32)
    dw_k = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(0) * ROWS
    while first < tokens * HEADS:
        row = first + tl.arange(0, ROWS)
        live = row < tokens * HEADS
        token, head = (row // HEADS).to(tl.int64), row % HEADS
        of_query, of_value = head < QUERIES, head >= TURNED
        mask = live[:, None] & (at < width)[None, :]
        both = (live & (head < TURNED))[:, None] & turns[None, :]
        from_q = dq + (token * strides[0] + head * width)
        from_k = dk + (token * strides[1] + (head - QUERIES) * width)
        from_v = dv + (token * strides[2] + (head - TURNED) * width)
        base = tl.where(of_query, from_q, tl.where(of_value, from_v, from_k))[:, None]
        g = tl.load(base + at[None, :], mask=mask, other=0.0)
        h = tl.load(base + other[None, :], mask=both, other=0.0)
        table = token[:, None] * HALF + angle[None, :]
        c = tl.load(cos + table, mask=both, other=1.0).to(tl.float32)
        s = tl.load(sin + table, mask=both, other=0.0).to(tl.float32)
        dtype = g.dtype
        near, far = (g.to(tl.float32) * c).to(dtype).to(tl.float32), (h.to(tl.float32) * s).to(dtype).to(tl.float32)
        d = tl.where((at < HALF)[None, :], near + far, near - far).to(dtype).to(tl.float32)
        if q_gain is not None:
            normed = live & (head < TURNED)
            a = tl.load(x + (token * x_stride + head * head_stride)[:, None] + at[None, :], mask=mask, other=0.0)
            scale = tl.load(inverse + token * TURNED + head, mask=normed, other=0.0)[:, None]
            n = a.to(tl.float32) * scale
            rounded = n.to(dtype).to(tl.float32)
            dw_q += tl.where(of_query[:, None], d * rounded, 0.0)
            dw_k += tl.where(of_query[:, None], 0.0, d * rounded)  # a value's scale is 0
            dn = d * _gain(q_gain, k_gain, at, at < width, of_query)
            d = tl.where(of_value[:, None], d, (dn - n * (tl.sum(dn * n, 1) / width)[:, None]) * scale)
        tl.store(dx + row.to(tl.int64)[:, None] * width + at[None, :], d.to(dtype), mask=mask)
        first += tl.num_programs(0) * ROWS
    if q_gain is not None:
        mine = found + tl.program_id(0) * 2 * width + at
        tl.store(mine, tl.sum(dw_q, 0), mask=at < width)
        tl.store(mine + width, tl.sum(dw_k, 0), mask=at < width)
