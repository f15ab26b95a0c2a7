"""`divergence` as Triton kernels over float32 logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import divergence as reference
from dovetail.kernels.divergence import Divergence, Pair

COLUMNS = 4096  # logits per step
WARPS = 8
KINDS = ("forward_kl", "reverse_kl", "jsd")
LOWEST = constexpr(torch.finfo(torch.float32).min / 4)  # as in the reference


def divergence_sums(z: Tensor, pair: Pair, divergence: Divergence) -> Tensor:
    n, columns = z.shape
    if not _takes(z, pair):
        return reference.divergence_sums(z, pair, divergence)
    sums = torch.empty((n, 2), dtype=z.dtype, device=z.device)
    rows = _rows(pair, divergence)
    kind = KINDS.index(divergence.kind)
    _pair_sums[(n,)](z, pair.w, rows, sums, columns, kind, COLUMNS, num_warps=WARPS)
    return sums


def divergence_grad_(
    z: Tensor,
    pair: Pair,
    local_targets: Tensor,
    grads: tuple[Tensor, Tensor | None, Tensor],
    second: Tensor,
    divergence: Divergence,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A half-precision result lies at the front of each row."""
    n, columns = z.shape
    if not _takes(z, pair):
        return reference.divergence_grad_(
            z, pair, local_targets, grads, second, divergence, dtype=dtype
        )
    out = z.view(dtype or z.dtype)[:, :columns]
    g, h, k = grads
    entropy = pair.total.log() - pair.offset
    own = torch.stack((g, torch.zeros_like(g) if h is None else h, entropy, k, second))
    rows = torch.cat((_rows(pair, divergence), own.to(z.dtype)))
    kind = KINDS.index(divergence.kind)
    _pair_grad[(n,)](z, pair.w, out, local_targets, rows, columns, kind, COLUMNS, num_warps=WARPS)
    return out


def _takes(z: Tensor, pair: Pair) -> bool:
    return z.numel() > 0 and all(
        x.dtype == torch.float32 and x.is_contiguous() for x in (z, pair.w)
    )


def _rows(pair: Pair, divergence: Divergence) -> Tensor:
    """[6, n]: peak and log total of both, 1 / temperature, beta."""
    heat = torch.ones_like(pair.peak) if pair.temperature is None else pair.temperature.reciprocal()
    logs = (pair.peak, pair.total.log(), pair.teacher_peak, pair.teacher_total.log())
    return torch.stack((*logs, heat, torch.full_like(heat, divergence.beta))).to(torch.float32)


@triton.jit
def _row_numbers(rows: tensor) -> tuple[tensor, tensor, tensor, tensor, tensor, tensor]:
    at = rows + tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    w_peak = tl.load(at + 2 * n)
    w_log_total = tl.load(at + 3 * n)
    return (
        tl.load(at),
        tl.load(at + n),
        w_peak,
        w_log_total,
        tl.load(at + 4 * n),
        tl.load(at + 5 * n),
    )


@triton.jit
def _logs(
    z: tensor, peak: tensor, log_total: tensor, scale: tensor, at: tensor, columns: constexpr
) -> tensor:
    logits = tl.load(z + at, mask=at < columns, other=float("-inf"))
    return tl.maximum((logits - peak) * scale - log_total, LOWEST)


@triton.jit
def _to_mixture(a: tensor, b: tensor, beta: tensor) -> tuple[tensor, tensor]:
    """b - log m and a - log m."""
    r = b - a
    share = tl.where(r > 0, 1.0 - beta, beta)
    near = tl.log(1.0 + share * (tl.exp(-tl.abs(r)) - 1.0))
    return tl.where(r > 0, -near, r - near), tl.where(r > 0, -r - near, -near)


@triton.jit
def _pair_sums(
    z: tensor,
    w: tensor,
    rows: tensor,
    sums: tensor,
    columns: constexpr,
    KIND: constexpr,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    peak, log_total, w_peak, w_log_total, scale, beta = _row_numbers(rows)
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = _logs(z + row * columns, peak, log_total, scale, at, columns)
        b = _logs(w + row * columns, w_peak, w_log_total, scale, at, columns)
        p = tl.exp(a)
        q = tl.exp(b)
        if KIND == 0:
            first += q * (b - a) + (p - q)
        elif KIND == 1:
            second += p * (a - b) + (q - p)
        else:
            to_q, to_p = _to_mixture(a, b, beta)
            m = beta * q + (1.0 - beta) * p
            first += q * to_q + (m - q)
            second += p * to_p + (m - p)
    tl.store(sums + row * 2, tl.sum(first, 0))
    tl.store(sums + row * 2 + 1, tl.sum(second, 0))


@triton.jit
def _pair_grad(
    z: tensor,
    w: tensor,
    out: tensor,
    labels: tensor,
    rows: tensor,
    width: constexpr,
    KIND: constexpr,
    BLOCK: constexpr,
) -> None:
    """rows [11, n]: `_rows`, g, h, entropy, k, second. `out` may be the front of z."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    peak, log_total, w_peak, w_log_total, scale, beta = _row_numbers(rows)
    g = tl.load(rows + 6 * n + row)
    h = tl.load(rows + 7 * n + row)
    entropy = tl.load(rows + 8 * n + row)
    k = tl.load(rows + 9 * n + row)
    second = tl.load(rows + 10 * n + row)
    target = tl.load(labels + row)
    out += row * width * (32 // out.dtype.element_ty.primitive_bitwidth)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = _logs(z + row * width, peak, log_total, scale, at, width)
        tl.debug_barrier()
        b = _logs(w + row * width, w_peak, w_log_total, scale, at, width)
        p = tl.exp(a)
        if KIND == 0:
            grad = k * (p - tl.exp(b))
        elif KIND == 1:
            grad = k * p * (a - b - second)
        else:
            _, to_p = _to_mixture(a, b, beta)
            grad = (1.0 - beta) * k * p * (to_p - second)
        grad += tl.where(at == target, g, 0.0) - p * (g + h * (a + entropy))
        tl.store(out + at, (grad * scale).to(out.dtype.element_ty), mask=at < width)
