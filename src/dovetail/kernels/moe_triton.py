"""What a mixture of experts does beside its products, as Triton kernels: the choice, and rows to experts and back.

Rows are found by a stable counting sort, moved once, and summed by the token that they belong to: nothing is added
atomically, and nothing is asked of the host. Importing this needs triton.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import reference
from dovetail.kernels.norm_triton import DTYPES

PIECE = 1024  # numbers of a row that a program moves
SORTED = 64  # copies that a program of the sort compares with each other
CHOICES = 2048  # scores that a program of the choice holds
MOST_SCORES = 4096  # of a row
MOST_COPIES = 32  # of a token
EXACT: Mapping[str, bool] = {"enable_fp_fusion": False}


def top_k(scores: Tensor, k: int) -> Tensor:
    """As `reference.top_k`, for float32 scores; of equal ones the first come first."""
    n, experts = scores.shape
    if scores.dtype != torch.float32 or not n or experts > MOST_SCORES or k > MOST_COPIES:
        return reference.top_k(scores, k)
    found = torch.empty((n, k), dtype=torch.int64, device=scores.device)
    columns = triton.next_power_of_2(experts)
    rows = max(1, CHOICES // columns)
    _top_k[(triton.cdiv(n, rows),)](scores.contiguous(), found, n, (experts, rows, columns), k, num_warps=4)
    return found


def permute(x: Tensor, experts: Tensor, count: int, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.permute`; backward, a token's copies are read where they are."""
    if not _taken(x, experts.shape[1]):
        return reference.permute(x, experts, count, total)
    rows, ends = sort_rows(experts, count)
    return spread(x, rows, experts.shape[1], total), rows, ends


def spread(x: Tensor, rows: Tensor, copies: int, total: int | None = None) -> Tensor:
    """As `reference.spread`; nothing is written where nobody may read."""
    if not _taken(x, copies):
        return reference.spread(x, rows, copies, total)
    found: Tensor = _Spread.apply(x, rows, copies, len(rows) if total is None else total)
    return found


def unpermute(x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """As `reference.unpermute`, reading a token's copies where they are, in both directions."""
    copies = (rows if weights is None else weights).shape[1]
    if not _taken(x, copies):
        return reference.unpermute(x, rows, weights)
    y: Tensor = _Sum.apply(x, rows, copies) if weights is None else _Combine.apply(x, rows, weights)
    return y


def _taken(x: Tensor, copies: int) -> bool:
    return x.dtype in DTYPES and x.numel() > 0 and copies <= MOST_COPIES


def sort_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """experts int [T, K] -> rows int32 [T K] and ends int64 [count], as `reference.permute` has them."""
    each = experts.flatten()
    blocks = triton.cdiv(len(each), SORTED)
    counts = torch.zeros((count, blocks), dtype=torch.int32, device=each.device)
    _count[(blocks,)](each, counts, len(each), count, blocks, SORTED, num_warps=4)
    ends = counts.view(-1).cumsum(0)  # of each block's rows of each expert
    rows = torch.empty(len(each), dtype=torch.int32, device=each.device)
    _place[(blocks,)](each, ends, rows, len(each), count, blocks, SORTED, num_warps=4)
    return rows, ends.view(count, blocks)[:, -1].contiguous()


class _Spread(torch.autograd.Function):
    """forward: each row of x to its places. backward: the sum of what is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, copies: int, total: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.copies = copies
        return spread_rows(x, rows, copies, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return collect_rows(grads[0], rows, ctx.copies), None, None, None


class _Sum(torch.autograd.Function):
    """forward: the sum of a token's copies. backward: its gradient to each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.copies, ctx.total = copies, len(x)
        return collect_rows(x, rows, copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return spread_rows(grads[0], rows, ctx.copies, ctx.total), None, None


class _Combine(torch.autograd.Function):
    """forward: the weighted sum of a token's copies. backward: dx by copy, and dw = <dy, copy>, each in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, rows, weights)
        return collect_rows(x, rows, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        dy, (x, rows, weights) = grads[0].contiguous(), ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(weights)
        size = (x.shape[1], weights.shape[1], PIECE)
        _combine_grad[(len(weights),)](dy, x, rows, weights, (dx, dw), len(x), size, num_warps=4, **EXACT)
        return dx, None, dw


def spread_rows(x: Tensor, rows: Tensor, copies: int, total: int) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((total, x.shape[1]))
    size, grid = _sizes(x, len(x), copies)
    _spread[grid](x, rows, out, x.stride(0), total, size, num_warps=_warps(size))
    return out


def collect_rows(x: Tensor, rows: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((rows.numel() // copies, x.shape[1]))
    size, grid = _sizes(x, len(out), copies)
    _collect[grid](x, rows, weights, out, x.stride(0), len(x), size, num_warps=_warps(size), **EXACT)
    return out


def _sizes(x: Tensor, tokens: int, copies: int) -> tuple[tuple[int, int, int], tuple[int]]:
    """What the kernels of rows are compiled for, and how many programs they are: one a piece of a token."""
    piece = min(PIECE, triton.next_power_of_2(x.shape[1]))
    return (x.shape[1], copies, piece), (tokens * triton.cdiv(x.shape[1], piece),)


def _warps(size: tuple[int, int, int]) -> int:
    return max(1, size[2] // 256)


@triton.jit(do_not_specialize=["length"])
def _spread(
    x: tl.tensor, rows: tl.tensor, out: tl.tensor, stride: tl.tensor, length: tl.tensor, SIZE: tl.constexpr
) -> None:
    """A piece of one token to all of its places below `length`."""
    width: tl.constexpr = SIZE[0]
    COPIES: tl.constexpr = SIZE[1]
    BLOCK: tl.constexpr = SIZE[2]
    PIECES: tl.constexpr = (width + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + token * stride + at, mask=at < width)
    for i in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + i).to(tl.int64)
        tl.store(out + row * width + at, a, mask=at < tl.where(row < length, width, 0))


@triton.jit(do_not_specialize=["length"])
def _collect(
    x: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """A piece of one token: the sum of what is at its places below `length`, each times its rounded weight where there are
    weights.
    """
    width: tl.constexpr = SIZE[0]
    COPIES: tl.constexpr = SIZE[1]
    BLOCK: tl.constexpr = SIZE[2]
    PIECES: tl.constexpr = (width + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = out.dtype.element_ty
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + i).to(tl.int64)
        there = row < length
        a = tl.load(x + row * stride + at, mask=at < tl.where(there, width, 0), other=0.0).to(tl.float32)
        if weights is not None:
            weight = tl.load(weights + token * COPIES + i)
            a *= tl.where(there, weight, 0.0).to(dtype).to(tl.float32)
        total += a
    tl.store(out + token * width + at, total.to(dtype), mask=at < width)


@triton.jit(do_not_specialize=["length"])
def _combine_grad(
    dy: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    made: tl.tensor,
    length: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """All of one token: what it asks of each copy, and of each weight. Reads come before writes, so that they overlap."""
    dx, dw = made
    width: tl.constexpr = SIZE[0]
    COPIES: tl.constexpr = SIZE[1]
    BLOCK: tl.constexpr = SIZE[2]
    token = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + i).to(tl.int64)
        there = row < length
        dots = tl.zeros((BLOCK,), tl.float32)
        for start in tl.static_range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            g = tl.load(dy + token * width + at, mask=at < width, other=0.0).to(tl.float32)
            dots += g * tl.load(x + row * width + at, mask=at < tl.where(there, width, 0), other=0.0).to(tl.float32)
        found = tl.where(there, tl.sum(dots, 0), 0.0)
        tl.store(dw + token * COPIES + i, found.to(dw.dtype.element_ty))
    for start in tl.static_range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(dy + token * width + at, mask=at < width, other=0.0).to(tl.float32)
        for i in tl.static_range(COPIES):
            row = tl.load(rows + token * COPIES + i).to(tl.int64)
            w = tl.load(weights + token * COPIES + i).to(dx.dtype.element_ty).to(tl.float32)
            mask = at < tl.where(row < length, width, 0)
            tl.store(dx + row * width + at, (g * w).to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "count", "blocks"])
def _count(
    each: tl.tensor, counts: tl.tensor, n: tl.tensor, count: tl.tensor, blocks: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """How many of a block's copies each expert has: its last one knows, and writes it."""
    _at, mine, live, same = _equals(each, n, BLOCK)
    others = tl.arange(0, BLOCK)
    after = tl.sum((same & (others[None, :] > others[:, None])).to(tl.int32), 1)
    known = live & (mine < count) & (after == 0)
    tl.store(counts + mine * blocks + tl.program_id(0), tl.sum(same.to(tl.int32), 1), mask=known)


@triton.jit(do_not_specialize=["n", "count", "blocks"])
def _place(
    each: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Where each copy goes: its block's rows of its expert end at `ends`, and some of them lie behind it. Those of no expert
    go to row n, which there is not.
    """
    at, mine, live, same = _equals(each, n, BLOCK)
    others = tl.arange(0, BLOCK)
    behind = tl.sum((same & (others[None, :] >= others[:, None])).to(tl.int32), 1)
    end = tl.load(ends + mine * blocks + tl.program_id(0), mask=live & (mine < count), other=0)
    tl.store(rows + at, tl.where(mine < count, end - behind, n).to(tl.int32), mask=live)


@triton.jit
def _equals(each: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block's copies, their experts, which of them there are, and which pairs share an expert."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(each + at, mask=at < n, other=-1).to(tl.int64)
    other = tl.load(each + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), mask=at < n, other=-1)
    return at, mine, at < n, mine[:, None] == other.to(tl.int64)[None, :]


@triton.jit(do_not_specialize=["n"])
def _top_k(scores: tl.tensor, found: tl.tensor, n: tl.tensor, SIZE: tl.constexpr, K: tl.constexpr) -> None:
    """Some rows' best columns, one after the other. Whole numbers sort as floats do, so a NaN is a column like others."""
    EXPERTS: tl.constexpr = SIZE[0]
    ROWS: tl.constexpr = SIZE[1]
    COLUMNS: tl.constexpr = SIZE[2]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    there = (row < n)[:, None] & (at < EXPERTS)[None, :]
    bits = tl.load(scores + row[:, None] * EXPERTS + at[None, :], mask=there, other=0.0).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where((at < EXPERTS)[None, :], rank * COLUMNS + (COLUMNS - 1 - at)[None, :], -(1 << 62))
    for i in tl.static_range(K):
        best = tl.max(key, 1)
        tl.store(found + row * K + i, COLUMNS - 1 - (best & (COLUMNS - 1)), mask=row < n)
        key = tl.where(key == best[:, None], -(1 << 62), key)
