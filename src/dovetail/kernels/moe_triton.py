"""Top-k, permute and unpermute as Triton kernels without atomic adds or host syncs."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import reference_experts
from dovetail.kernels.norm_triton import DTYPES, EXACT, Tile, dense_rows

PIECE = 1024  # numbers per program
SORT_BLOCK = 64  # copies per program
TOP_K_BLOCK = 2048  # scores per program
MAX_EXPERTS = 4096
MAX_COPIES = 32  # of a token


class RowSize(NamedTuple):
    """Numbers of a row, copies of a token, numbers per program."""

    width: int
    copies: int
    block: int


def top_k(scores: Tensor, k: int) -> Tensor:
    n, experts = scores.shape
    if scores.dtype != torch.float32 or not n or experts > MAX_EXPERTS or k > MAX_COPIES:
        return reference_experts.top_k(scores, k)
    indices = torch.empty((n, k), dtype=torch.int64, device=scores.device)
    columns = triton.next_power_of_2(experts)
    rows = max(1, TOP_K_BLOCK // columns)
    _top_k[(triton.cdiv(n, rows),)](
        scores.contiguous(), indices, n, Tile(experts, rows, columns), k, num_warps=4
    )
    return indices


def permute(
    x: Tensor, experts: Tensor, count: int, total: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if not _supported(x, experts.shape[1]):
        return reference_experts.permute(x, experts, count, total)
    rows, ends = sort_rows(experts, count)
    return permute_tokens(x, rows, experts.shape[1], total), rows, ends


def permute_tokens(x: Tensor, rows: Tensor, copies: int, total: int | None = None) -> Tensor:
    if not _supported(x, copies):
        return reference_experts.permute_tokens(x, rows, copies, total)
    return _MoveRows.apply(x, rows, copies, len(rows) if total is None else total, False)


def unpermute(x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    copies = (rows if weights is None else weights).shape[1]
    if not _supported(x, copies):
        return reference_experts.unpermute(x, rows, weights)
    if weights is None:
        return _MoveRows.apply(x, rows, copies, len(x), True)
    return _UnpermuteWeighted.apply(x, rows, weights)


def _supported(x: Tensor, copies: int) -> bool:
    return x.dtype in DTYPES and x.numel() > 0 and copies <= MAX_COPIES


def sort_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`rows` int32 [T K] and `ends` int64 [count] of `reference_experts.permute`, by a stable counting sort."""
    flat = experts.flatten()
    blocks = triton.cdiv(len(flat), SORT_BLOCK)
    counts = torch.zeros((count, blocks), dtype=torch.int32, device=flat.device)
    _count[(blocks,)](flat, counts, len(flat), count, blocks, SORT_BLOCK, num_warps=4)
    ends = counts.view(-1).cumsum(0)
    rows = torch.empty(len(flat), dtype=torch.int32, device=flat.device)
    _place[(blocks,)](flat, ends, rows, len(flat), count, blocks, SORT_BLOCK, num_warps=4)
    return rows, ends.view(count, blocks)[:, -1].contiguous()


class _MoveRows(torch.autograd.Function):
    """forward: copy tokens to their rows, or if `back` sum a token's rows. backward: the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, copies: int, total: int, back: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.copies = copies
        ctx.total = total
        ctx.back = back
        return unpermute_rows(x, rows, copies) if back else permute_rows(x, rows, copies, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (rows,) = ctx.saved_tensors
        copies = ctx.copies
        dx = (
            permute_rows(dy, rows, copies, ctx.total)
            if ctx.back
            else unpermute_rows(dy, rows, copies)
        )
        return dx, None, None, None, None


class _UnpermuteWeighted(torch.autograd.Function):
    """forward: y = sum w x over a token's rows. backward: dx = w dy, dw = <dy, x>."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        x = x.contiguous()
        weights = weights.contiguous()
        ctx.save_for_backward(x, rows, weights)
        return unpermute_rows(x, rows, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        dy = grads[0].contiguous()
        (x, rows, weights) = ctx.saved_tensors
        dx = torch.empty_like(x)
        dw = torch.empty_like(weights)
        size = RowSize(x.shape[1], weights.shape[1], PIECE)
        _unpermute_grad[(len(weights),)](
            dy, x, rows, weights, (dx, dw), len(x), size, num_warps=4, **EXACT
        )
        return dx, None, dw


def permute_rows(x: Tensor, rows: Tensor, copies: int, total: int) -> Tensor:
    x = dense_rows(x)
    out = x.new_empty((total, x.shape[1]))
    size, grid, warps = _launch(x, len(x), copies)
    _permute[grid](x, rows, out, x.stride(0), total, size, num_warps=warps)
    return out


def unpermute_rows(x: Tensor, rows: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    x = dense_rows(x)
    out = x.new_empty((rows.numel() // copies, x.shape[1]))
    size, grid, warps = _launch(x, len(out), copies)
    _unpermute[grid](x, rows, weights, out, x.stride(0), len(x), size, num_warps=warps, **EXACT)
    return out


def _launch(x: Tensor, tokens: int, copies: int) -> tuple[RowSize, tuple[int], int]:
    piece = min(PIECE, triton.next_power_of_2(x.shape[1]))
    return (
        RowSize(x.shape[1], copies, piece),
        (tokens * triton.cdiv(x.shape[1], piece),),
        max(1, piece // 256),
    )


@triton.jit(do_not_specialize=["length"])
def _permute(
    x: tensor, rows: tensor, out: tensor, stride: tensor, length: tensor, SIZE: constexpr
) -> None:
    COPIES: constexpr = (
        SIZE.copies
    )  # neither static_range nor a shape takes an attribute in triton 3.6
    PIECES: constexpr = (SIZE.width + SIZE.block - 1) // SIZE.block
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * SIZE.block + tl.arange(0, SIZE.block)
    a = tl.load(x + token * stride + at, mask=at < SIZE.width)
    for i in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + i).to(tl.int64)
        tl.store(out + row * SIZE.width + at, a, mask=at < tl.where(row < length, SIZE.width, 0))


@triton.jit(do_not_specialize=["length"])
def _unpermute(
    x: tensor,
    rows: tensor,
    weights: tensor,
    out: tensor,
    stride: tensor,
    length: tensor,
    SIZE: constexpr,
) -> None:
    COPIES: constexpr = SIZE.copies
    PIECES: constexpr = (SIZE.width + SIZE.block - 1) // SIZE.block
    dtype: constexpr = out.dtype.element_ty
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * SIZE.block + tl.arange(0, SIZE.block)
    BLOCK: constexpr = SIZE.block
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + i).to(tl.int64)
        valid = row < length
        a = tl.load(x + row * stride + at, mask=at < tl.where(valid, SIZE.width, 0), other=0.0).to(
            tl.float32
        )
        if weights is not None:
            weight = tl.load(weights + token * COPIES + i)
            a *= tl.where(valid, weight, 0.0).to(dtype).to(tl.float32)
        total += a
    tl.store(out + token * SIZE.width + at, total.to(dtype), mask=at < SIZE.width)


@triton.jit(do_not_specialize=["length"])
def _unpermute_grad(
    dy: tensor,
    x: tensor,
    rows: tensor,
    weights: tensor,
    grads: tensor,
    length: tensor,
    SIZE: constexpr,
) -> None:
    dx, dw = grads
    COPIES: constexpr = SIZE.copies
    WIDTH: constexpr = SIZE.width
    BLOCK: constexpr = SIZE.block
    token = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + i).to(tl.int64)
        valid = row < length
        dots = tl.zeros((BLOCK,), tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            g = tl.load(dy + token * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            dots += g * tl.load(
                x + row * WIDTH + at, mask=at < tl.where(valid, WIDTH, 0), other=0.0
            ).to(tl.float32)
        dot = tl.where(valid, tl.sum(dots, 0), 0.0)
        tl.store(dw + token * COPIES + i, dot.to(dw.dtype.element_ty))
    for start in tl.static_range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(dy + token * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        for i in tl.static_range(COPIES):
            row = tl.load(rows + token * COPIES + i).to(tl.int64)
            w = tl.load(weights + token * COPIES + i).to(dx.dtype.element_ty).to(tl.float32)
            mask = at < tl.where(row < length, WIDTH, 0)
            tl.store(dx + row * WIDTH + at, (g * w).to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "count", "blocks"])
def _count(
    experts: tensor, counts: tensor, n: tensor, count: tensor, blocks: tensor, BLOCK: constexpr
) -> None:
    _at, expert, live, same = _equals(experts, n, BLOCK)
    others = tl.arange(0, BLOCK)
    after = tl.sum((same & (others[None, :] > others[:, None])).to(tl.int32), 1)
    last = live & (expert < count) & (after == 0)
    tl.store(counts + expert * blocks + tl.program_id(0), tl.sum(same.to(tl.int32), 1), mask=last)


@triton.jit(do_not_specialize=["n", "count", "blocks"])
def _place(
    experts: tensor,
    ends: tensor,
    rows: tensor,
    n: tensor,
    count: tensor,
    blocks: tensor,
    BLOCK: constexpr,
) -> None:
    at, expert, live, same = _equals(experts, n, BLOCK)
    others = tl.arange(0, BLOCK)
    behind = tl.sum((same & (others[None, :] >= others[:, None])).to(tl.int32), 1)
    end = tl.load(ends + expert * blocks + tl.program_id(0), mask=live & (expert < count), other=0)
    tl.store(rows + at, tl.where(expert < count, end - behind, n).to(tl.int32), mask=live)


@triton.jit
def _equals(experts: tensor, n: tensor, BLOCK: constexpr) -> tuple[tensor, tensor, tensor, tensor]:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at, mask=at < n, other=-1).to(tl.int64)
    other = tl.load(
        experts + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), mask=at < n, other=-1
    )
    return at, expert, at < n, expert[:, None] == other.to(tl.int64)[None, :]


@triton.jit(do_not_specialize=["n"])
def _top_k(scores: tensor, indices: tensor, n: tensor, TILE: constexpr, K: constexpr) -> None:
    """Compares floats as integers, so NaN has a rank."""
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    at = tl.arange(0, TILE.columns)
    valid = (row < n)[:, None] & (at < TILE.width)[None, :]
    bits = tl.load(scores + row[:, None] * TILE.width + at[None, :], mask=valid, other=0.0).to(
        tl.int32, bitcast=True
    )
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(
        (at < TILE.width)[None, :],
        rank * TILE.columns + (TILE.columns - 1 - at)[None, :],
        -(1 << 62),
    )
    for i in tl.static_range(K):
        best = tl.max(key, 1)
        tl.store(
            indices + row * K + i, TILE.columns - 1 - (best & (TILE.columns - 1)), mask=row < n
        )
        key = tl.where(key == best[:, None], -(1 << 62), key)
