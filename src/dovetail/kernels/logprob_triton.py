"""The LM head's passes over float32 logits as Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import reference

COLUMNS = 8192  # logits per step
WARPS = 8
LOWEST = constexpr(torch.finfo(torch.float32).min / 2)  # as in the reference: e^-inf (-inf) is 0


def vocab_stats(z: Tensor, local_targets: Tensor, temperature: Tensor | None = None) -> Tensor:
    n, columns = z.shape
    if z.dtype != torch.float32 or z.stride(1) != 1 or z.numel() == 0:
        return reference.vocab_stats(z, local_targets, temperature)
    stats = torch.empty((n, 4), dtype=z.dtype, device=z.device)
    inverse = _inverse(z, temperature)
    _row_stats[(n,)](
        z, local_targets, inverse, stats, columns, z.stride(0), COLUMNS, num_warps=WARPS
    )
    return stats


def vocab_grad_(
    z: Tensor,
    local_targets: Tensor,
    normalizer: tuple[Tensor, ...],
    g: Tensor,
    h: Tensor | None,
    temperature: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A half-precision result lies at the front of each row."""
    n, columns = z.shape
    if z.dtype != torch.float32 or not z.is_contiguous() or z.numel() == 0:
        return reference.vocab_grad_(z, local_targets, normalizer, g, h, temperature, dtype=dtype)
    out = z.view(dtype or z.dtype)[:, :columns]
    peak, total, offset = normalizer
    zero = torch.zeros_like(peak)
    entropy = (zero, zero) if h is None else (offset, h / total)
    rows = torch.stack((peak, g, g / total, *entropy, _inverse(z, temperature)))
    _row_grad[(n,)](z, out, local_targets, rows, columns, out.stride(0), COLUMNS, num_warps=WARPS)
    return out


def _inverse(z: Tensor, temperature: Tensor | None) -> Tensor:
    return torch.ones_like(z[:, 0]) if temperature is None else temperature.to(z.dtype).reciprocal()


@triton.jit
def _row_stats(
    z: tensor,
    targets: tensor,
    inverse: tensor,
    stats: tensor,
    columns: constexpr,
    stride: tensor,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    m = float("-inf")
    s = 0.0
    u = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block = tl.load(z + row * stride + at, mask=at < columns, other=float("-inf"))
        peak = tl.maximum(m, tl.max(block, 0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        shifted = (block - base) * scale
        weights = tl.exp(shifted)
        behind = tl.where(m == float("-inf"), 0.0, (m - base) * scale)
        shrink = tl.where(m == float("-inf"), 0.0, tl.exp(behind))
        u = shrink * (u + s * behind) + tl.sum(weights * tl.maximum(shifted, LOWEST), 0)
        s = shrink * s + tl.sum(weights, 0)
        m = peak
    target = tl.load(targets + row)
    local = (target >= 0) & (target < columns)
    t = tl.load(z + row * stride + tl.where(local, target, 0))
    tl.store(stats + row * 4, m)
    tl.store(stats + row * 4 + 1, s)
    tl.store(stats + row * 4 + 2, u)
    tl.store(stats + row * 4 + 3, tl.where(local, t, 0.0))


@triton.jit
def _row_grad(
    z: tensor,
    out: tensor,
    targets: tensor,
    rows: tensor,
    columns: constexpr,
    out_stride: tensor,
    BLOCK: constexpr,
) -> None:
    """rows [6, n]: peak, g, g / total, offset, h / total, 1 / temperature. The barrier: `out` may be the front of z."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    peak = tl.load(rows + row)
    g = tl.load(rows + n + row)
    by_logprob = tl.load(rows + 2 * n + row)
    offset = tl.load(rows + 3 * n + row)
    by_entropy = tl.load(rows + 4 * n + row)
    scale = tl.load(rows + 5 * n + row)
    target = tl.load(targets + row)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block = tl.load(z + row * columns + at, mask=at < columns, other=float("-inf"))
        tl.debug_barrier()
        shifted = (block - peak) * scale
        factor = by_logprob + by_entropy * tl.maximum(shifted - offset, LOWEST)
        grad = tl.where(at == target, g, 0.0) - tl.exp(shifted) * factor
        tl.store(
            out + row * out_stride + at, (grad * scale).to(out.dtype.element_ty), mask=at < columns
        )
