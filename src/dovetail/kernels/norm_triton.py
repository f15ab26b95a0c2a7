"""Add + RMSNorm, SwiGLU and deterministic sums as Triton kernels, rounded as in the reference."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 16384  # of a row
TILE_SIZE = 2048  # numbers per program
PROGRAMS = 264
STAGES = 3  # of a gain's gradient: two programs a multiprocessor
PIECE = 1024  # numbers per program
EXACT: Mapping[str, bool] = {"enable_fp_fusion": False}  # round a product before it is added


class Tile(NamedTuple):
    """Numbers of a row; rows and columns per step."""

    width: int
    rows: int
    columns: int


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_norm(x, None, weight, eps)[1]


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if (
        not supported(x, weight)
        or x.shape[-1] > MAX_WIDTH
        or (y is not None and y.dtype != x.dtype)
    ):
        return reference.add_norm(x, y, weight, eps)
    return _AddNorm.apply(x, y, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate_up) if supported(gate_up, gate_up) else reference.swiglu(gate_up)


def sum_deterministic(parts: Tensor, out: Tensor | None = None) -> Tensor:
    if not supported(parts, parts):
        return reference.sum_deterministic(parts, out)
    if not parts[0].is_contiguous():
        parts = parts.contiguous()
    total = parts.new_empty(parts.shape[1:]) if out is None else out
    numbers = total.numel()
    grid = (triton.cdiv(total.numel(), PIECE),)
    _sum[grid](parts, total, numbers, parts.stride(0), len(parts), PIECE, num_warps=4)
    return total


def supported(x: Tensor, other: Tensor) -> bool:
    return x.dtype in DTYPES and other.dtype == x.dtype and x.numel() > 0


@cache
def tile_for(width: int) -> tuple[Tile, int]:
    columns = triton.next_power_of_2(width)
    return Tile(width, max(1, TILE_SIZE // columns), columns), min(16, max(4, columns // 512))


def stages(tensors: int, tile: Tile, like: Tensor) -> int:
    return max(
        1,
        min(
            STAGES,
            shared_bytes(like.device) // (tensors * tile.rows * tile.columns * like.itemsize),
        ),
    )


@cache
def shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"]) * 3 // 4


def column_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [n, ...] -> [...] in `dtype`, in a fixed order."""
    total = torch.empty_like(partial[0], dtype=dtype)
    tile = Tile(partial[0].numel(), 64, 16)
    _columns[(triton.cdiv(tile.width, tile.columns),)](
        partial, total, len(partial), tile, num_warps=4
    )
    return total


def dense_rows(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class _AddNorm(torch.autograd.Function):
    """forward: s = x + y, or x; n = s / rms(s) * weight. backward: dx = dy = ds + the gradient of n."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows = dense_rows(x)
        added = None if y is None else y.contiguous()
        tile, warps = tile_for(rows.shape[1])
        normed = rows.new_empty(rows.shape)
        total = None if y is None else torch.empty_like(normed)
        inverse = rows.new_empty(len(rows), dtype=torch.float32)
        grid = (triton.cdiv(len(rows), tile.rows),)
        outputs = (total, normed, inverse)
        _norm[grid](
            rows,
            added,
            weight,
            outputs,
            len(rows),
            rows.stride(0),
            eps,
            tile,
            num_warps=warps,
            **EXACT,
        )
        ctx.save_for_backward(rows if total is None else total, weight, inverse)
        ctx.alone = y is None
        ctx.set_materialize_grads(False)
        return x.view_as(x) if total is None else total.view(x.shape), normed.view(x.shape)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        d_total, dn = grads
        if dn is None:
            return d_total, None if ctx.alone else d_total, None, None
        rows, weight, inverse = ctx.saved_tensors
        tile, warps = tile_for(rows.shape[1])
        dy = dn.contiguous()
        ds = None if d_total is None else d_total.contiguous()
        dx = rows.new_empty(dn.shape)
        programs = min(PROGRAMS, triton.cdiv(len(rows), tile.rows))
        partial = rows.new_empty((programs, rows.shape[1]), dtype=torch.float32)
        inputs = (rows, weight, inverse, dy, ds)
        depth = stages(3, tile, rows)
        _norm_grad[(programs,)](
            inputs, dx, partial, len(rows), rows.stride(0), tile, depth, num_warps=warps, **EXACT
        )
        return dx, None if ctx.alone else dx, column_sums(partial, weight.dtype), None


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x: tensor,
    y: tensor,
    weight: tensor,
    outputs: tensor,
    rows: tensor,
    stride: tensor,
    eps: tensor,
    TILE: constexpr,
) -> None:
    total, normed, inverse = outputs
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    at = tl.arange(0, TILE.columns)
    mask = (row < rows)[:, None] & (at < TILE.width)[None, :]
    out = row[:, None] * TILE.width + at[None, :]
    a = tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0.0)
    dtype = a.dtype
    if y is not None:
        a = (a.to(tl.float32) + tl.load(y + out, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + out, a, mask=mask)
    a = a.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 1) / TILE.width + eps)
    tl.store(inverse + row, scale, mask=row < rows)
    w = tl.load(weight + at, mask=at < TILE.width, other=0.0).to(tl.float32)
    n = (a * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(normed + out, (n * w[None, :]).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _norm_grad(
    inputs: tensor,
    dx: tensor,
    partial: tensor,
    rows: tensor,
    stride: tensor,
    TILE: constexpr,
    STAGES: constexpr,
) -> None:
    x, weight, inverse, dy, ds = inputs
    at = tl.arange(0, TILE.columns)
    w = tl.load(weight + at, mask=at < TILE.width, other=0.0).to(tl.float32)
    ROWS: constexpr = TILE.rows  # a shape takes no attribute in triton 3.6
    COLUMNS: constexpr = TILE.columns
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(
        tl.program_id(0) * TILE.rows, rows, tl.num_programs(0) * TILE.rows, num_stages=STAGES
    ):
        row = first + tl.arange(0, TILE.rows).to(tl.int64)
        mask = (row < rows)[:, None] & (at < TILE.width)[None, :]
        out = row[:, None] * TILE.width + at[None, :]
        a = tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0.0)
        g = tl.load(dy + out, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        n = a.to(tl.float32) * scale
        dn = g * w[None, :]
        d = (dn - n * (tl.sum(dn * n, 1) / TILE.width)[:, None]) * scale
        if ds is not None:
            d += tl.load(ds + out, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + out, d.to(a.dtype), mask=mask)
        dw += g * n.to(a.dtype).to(tl.float32)
    tl.store(partial + tl.program_id(0) * TILE.width + at, tl.sum(dw, 0), mask=at < TILE.width)


@triton.jit(do_not_specialize=["count"])
def _columns(partial: tensor, total: tensor, count: tensor, TILE: constexpr) -> None:
    at = tl.program_id(0) * TILE.columns + tl.arange(0, TILE.columns)
    ROWS: constexpr = TILE.rows
    COLUMNS: constexpr = TILE.columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, TILE.rows):
        row = first + tl.arange(0, TILE.rows)
        mask = (row < count)[:, None] & (at < TILE.width)[None, :]
        sums += tl.load(partial + row[:, None] * TILE.width + at[None, :], mask=mask, other=0.0)
    tl.store(total + at, tl.sum(sums, 0).to(total.dtype.element_ty), mask=at < TILE.width)


class _SwiGLU(torch.autograd.Function):
    """forward: silu(gate) * up. backward: the joint gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = dense_rows(gate_up)
        ctx.save_for_backward(rows)
        width = rows.shape[1] // 2
        y = rows.new_empty((len(rows), width))
        grid = (len(rows) * triton.cdiv(width, PIECE),)
        _swiglu[grid](rows, y, rows.stride(0), width, PIECE, num_warps=4, **EXACT)
        return y.view(*gate_up.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (dy,) = grads
        (rows,) = ctx.saved_tensors
        width = rows.shape[1] // 2
        dense = dense_rows(dy)
        dx = rows.new_empty(rows.shape)
        grid = (len(rows) * triton.cdiv(width, PIECE),)
        strides = (rows.stride(0), dense.stride(0))
        _swiglu_grad[grid](rows, dense, dx, strides, width, PIECE, num_warps=4, **EXACT)
        return dx.view(*dy.shape[:-1], 2 * width)


@triton.jit
def _swiglu(gate_up: tensor, y: tensor, stride: tensor, width: constexpr, BLOCK: constexpr) -> None:
    PIECES: constexpr = (width + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + at, mask=at < width, other=0.0)
    up = tl.load(gate_up + row * stride + width + at, mask=at < width, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(y + row * width + at, (silu * up.to(tl.float32)).to(gate.dtype), mask=at < width)


@triton.jit
def _swiglu_grad(
    gate_up: tensor, dy: tensor, dx: tensor, strides: tensor, width: constexpr, BLOCK: constexpr
) -> None:
    PIECES: constexpr = (width + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * strides[0] + at, mask=at < width, other=0.0)
    up = tl.load(gate_up + row * strides[0] + width + at, mask=at < width, other=0.0).to(tl.float32)
    g = tl.load(dy + row * strides[1] + at, mask=at < width, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    silu = (wide * share).to(gate.dtype).to(tl.float32)
    d_silu = (g * up).to(gate.dtype).to(tl.float32)
    d_gate = d_silu * share * (1.0 + wide * (1.0 - share))
    tl.store(dx + row * 2 * width + at, d_gate.to(gate.dtype), mask=at < width)
    tl.store(dx + row * 2 * width + width + at, (g * silu).to(gate.dtype), mask=at < width)


@triton.jit
def _sum(
    parts: tensor,
    total: tensor,
    numbers: tensor,
    stride: tensor,
    COUNT: constexpr,
    BLOCK: constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = parts + at
    acc = tl.load(place, mask=at < numbers, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, COUNT):
        place += stride
        acc += tl.load(place, mask=at < numbers, other=0.0).to(tl.float32)
    tl.store(total + at, acc.to(total.dtype.element_ty), mask=at < numbers)
