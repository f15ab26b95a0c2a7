"""What a block does beside its products and attention, as Triton kernels that read and write everything once.

They round where the reference rounds, and add in float32 what it adds in its own dtype. Nothing is added atomically: a
gain's gradient is a sum over what a fixed number of programs found, each in the order of its rows. Sizes of a model are
compiled in, counts of tokens are not. Importing this needs triton.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 16384  # numbers of a row that a program holds at once
TILE = 2048  # numbers that a program holds where rows are shorter
PROGRAMS = 264  # that share the rows of a gain's gradient: two for each of an H200's multiprocessors
STAGES = 3  # rows that such a program has on their way, or at work
COLUMN_TILE = (64, 16)  # rows and columns of a column's sum
PIECE = 1024  # numbers of a row of swiglu's, or of a sum, that a program computes
LAID = 8192  # numbers that a program copies
EXACT: Mapping[str, bool] = {"enable_fp_fusion": False}  # a product is rounded before it is added


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`, in one pass."""
    return add_norm(x, None, weight, eps)[1]


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_norm`, in one pass; backward, the gradient of what goes on is added in the same pass."""
    if not taken(x, weight) or x.shape[-1] > WIDEST or (y is not None and y.dtype != x.dtype):
        return reference.add_norm(x, y, weight, eps)
    total, normed = _AddNorm.apply(x, y, weight, eps)
    return total, normed


def swiglu(gate_up: Tensor) -> Tensor:
    """As `reference.swiglu`, in one pass each way, keeping its argument alone."""
    if not taken(gate_up, gate_up):
        return reference.swiglu(gate_up)
    y: Tensor = _SwiGLU.apply(gate_up)
    return y


def sum_deterministic(parts: Tensor, out: Tensor | None = None, own: tuple[int, Tensor] | None = None) -> Tensor:
    """As `reference.sum_in_order`, in one pass that reads each part once; equal bits."""
    if not taken(parts, parts):
        return reference.sum_deterministic(parts, out, own)
    if not parts[0].is_contiguous():
        parts = parts.contiguous()
    total = parts.new_empty(parts.shape[1:]) if out is None else out
    which, part = (-1, parts) if own is None else own
    numbers, grid = total.numel(), (triton.cdiv(total.numel(), PIECE),)
    _sum[grid](parts, part, total, numbers, parts.stride(0), which, len(parts), PIECE, num_warps=4)
    return total


def copy_to_both(x: Tensor, first: Tensor, second: Tensor) -> None:
    """As `reference.lay_twice`, reading x once."""
    if x.dtype not in DTYPES or x.numel() == 0:
        return reference.copy_to_both(x, first, second)
    _lay[(triton.cdiv(x.numel(), LAID),)](x, first, second, x.numel(), LAID, num_warps=8)
    return None


def taken(x: Tensor, other: Tensor) -> bool:
    return x.dtype in DTYPES and other.dtype == x.dtype and x.numel() > 0


def tile(width: int) -> tuple[tuple[int, int, int], int]:
    """(width, rows and columns of a program's tile), and its warps."""
    columns = triton.next_power_of_2(width)
    return (width, max(1, TILE // columns), columns), min(16, max(4, columns // 512))


def stages(tensors: int, size: tuple[int, int, int], like: Tensor) -> int:
    """How many tiles of so many tensors a program may have in its shared memory: 1 where there is no room for more."""
    return max(1, min(STAGES, shared_bytes(like.device) // (tensors * size[1] * size[2] * like.itemsize)))


@cache
def shared_bytes(device: torch.device) -> int:
    """That a program may have, but for what the compiler needs itself."""
    if device.type != "cuda":
        return 0
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(found["max_shared_mem"]) * 3 // 4


def column_sums(found: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense float32 [n, ...] -> [...] in `dtype`: each number's sum over n, in one order."""
    total, numbers = torch.empty_like(found[0], dtype=dtype), found[0].numel()
    _columns[(triton.cdiv(numbers, COLUMN_TILE[1]),)](found, total, len(found), numbers, COLUMN_TILE, num_warps=4)
    return total


def _dense_rows(x: Tensor) -> Tensor:
    """[..., D] as [n, D] whose rows are dense, copied only where they are not."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class _AddNorm(torch.autograd.Function):
    """forward: s = x + y, or x; n = s / rms(s) * weight. Keeps s and 1 / rms. backward: ds + what n asks of s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, added = _dense_rows(x), None if y is None else y.reshape(-1, y.shape[-1]).contiguous()
        size, warps = tile(rows.shape[1])
        normed = rows.new_empty(rows.shape)
        total = None if y is None else torch.empty_like(normed)
        inverse = rows.new_empty(len(rows), dtype=torch.float32)
        grid = (triton.cdiv(len(rows), size[1]),)
        made = (total, normed, inverse)
        _norm[grid](rows, added, weight, made, len(rows), rows.stride(0), eps, size, num_warps=warps, **EXACT)
        ctx.save_for_backward(rows if total is None else total, weight, inverse)
        ctx.alone = y is None
        ctx.set_materialize_grads(False)
        return x.view_as(x) if total is None else total.view(x.shape), normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        kept, dn = grads
        if dn is None:
            return kept, None if ctx.alone else kept, None, None
        rows, weight, inverse = ctx.saved_tensors
        size, warps = tile(rows.shape[1])
        dy, ds = dn.reshape(rows.shape).contiguous(), None if kept is None else kept.reshape(rows.shape).contiguous()
        dx = rows.new_empty(rows.shape)
        programs = min(PROGRAMS, triton.cdiv(len(rows), size[1]))
        found = rows.new_empty((programs, rows.shape[1]), dtype=torch.float32)
        given, ahead = (rows, weight, inverse, dy, ds), stages(3, size, rows)
        _norm_grad[(programs,)](given, dx, found, len(rows), rows.stride(0), size, ahead, num_warps=warps, **EXACT)
        dx = dx.view(dn.shape)
        return dx, None if ctx.alone else dx, column_sums(found, weight.dtype), None


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    made: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Some rows: their sum where there is a y, 1 / rms, and the normed row."""
    width: tl.constexpr = SIZE[0]
    ROWS: tl.constexpr = SIZE[1]
    COLUMNS: tl.constexpr = SIZE[2]
    total, normed, inverse = made
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (at < width)[None, :]
    out = row[:, None] * width + at[None, :]
    a = tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0.0)
    dtype = a.dtype
    if y is not None:
        a = (a.to(tl.float32) + tl.load(y + out, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + out, a, mask=mask)
    a = a.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 1) / width + eps)
    tl.store(inverse + row, scale, mask=row < rows)
    w = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    n = (a * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(normed + out, (n * w[None, :]).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _norm_grad(
    given: tl.tensor,
    dx: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Every so manieth tile of rows, while the next ones come: their gradients, and the sum of what they ask of the gain."""
    width: tl.constexpr = SIZE[0]
    ROWS: tl.constexpr = SIZE[1]
    COLUMNS: tl.constexpr = SIZE[2]
    x, weight, inverse, dy, ds = given
    at = tl.arange(0, COLUMNS)
    w = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (at < width)[None, :]
        out = row[:, None] * width + at[None, :]
        a = tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0.0)
        g = tl.load(dy + out, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        n, dn = a.to(tl.float32) * scale, g * w[None, :]
        d = (dn - n * (tl.sum(dn * n, 1) / width)[:, None]) * scale
        if ds is not None:
            d += tl.load(ds + out, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + out, d.to(a.dtype), mask=mask)
        dw += g * n.to(a.dtype).to(tl.float32)
    tl.store(found + tl.program_id(0) * width + at, tl.sum(dw, 0), mask=at < width)


@triton.jit(do_not_specialize=["count"])
def _columns(found: tl.tensor, total: tl.tensor, count: tl.tensor, numbers: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Some columns of `count` rows."""
    ROWS: tl.constexpr = SIZE[0]
    COLUMNS: tl.constexpr = SIZE[1]
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (at < numbers)[None, :]
        sums += tl.load(found + row[:, None] * numbers + at[None, :], mask=mask, other=0.0)
    tl.store(total + at, tl.sum(sums, 0).to(total.dtype.element_ty), mask=at < numbers)


class _SwiGLU(torch.autograd.Function):
    """forward: silu(gate) * up, of which it keeps the joint argument. backward: one joint gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = _dense_rows(gate_up)
        ctx.save_for_backward(rows)
        width = rows.shape[1] // 2
        y = rows.new_empty((len(rows), width))
        grid = (len(rows) * triton.cdiv(width, PIECE),)
        _swiglu[grid](rows, y, rows.stride(0), width, PIECE, num_warps=4, **EXACT)
        return y.view(*gate_up.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (dy,), (rows,) = grads, ctx.saved_tensors
        width = rows.shape[1] // 2
        dense, dx = _dense_rows(dy), rows.new_empty(rows.shape)
        grid = (len(rows) * triton.cdiv(width, PIECE),)
        strides = (rows.stride(0), dense.stride(0))
        _swiglu_grad[grid](rows, dense, dx, strides, width, PIECE, num_warps=4, **EXACT)
        return dx.view(*dy.shape[:-1], 2 * width)


@triton.jit
def _swiglu(gate_up: tl.tensor, y: tl.tensor, stride: tl.tensor, width: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A piece of one row."""
    PIECES: tl.constexpr = (width + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + at, mask=at < width, other=0.0)
    up = tl.load(gate_up + row * stride + width + at, mask=at < width, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(y + row * width + at, (silu * up.to(tl.float32)).to(gate.dtype), mask=at < width)


@triton.jit
def _swiglu_grad(
    gate_up: tl.tensor,
    dy: tl.tensor,
    dx: tl.tensor,
    strides: tl.tensor,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Both gradients of a piece of one row."""
    PIECES: tl.constexpr = (width + BLOCK - 1) // BLOCK
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
    parts: tl.tensor,
    own: tl.tensor,
    total: tl.tensor,
    numbers: tl.tensor,
    stride: tl.tensor,
    WHICH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A piece of the sum of COUNT parts of so many numbers, of which `own` is the one WHICH."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = parts + at
    found = tl.load(own + at if WHICH == 0 else place, mask=at < numbers, other=0.0).to(tl.float32)
    for part in tl.static_range(1, COUNT):
        place += stride
        found += tl.load(own + at if part == WHICH else place, mask=at < numbers, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=at < numbers)


@triton.jit
def _lay(x: tl.tensor, first: tl.tensor, second: tl.tensor, numbers: tl.tensor, BLOCK: tl.constexpr) -> None:
    """A piece of x, to both."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + at, mask=at < numbers)
    tl.store(first + at, found, mask=at < numbers)
    tl.store(second + at, found, mask=at < numbers)
