"""The LM head's products by quack, on Hopper."""

import importlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import quack

TILE = (128, 192)  # the fastest
ROWS = 32
TILES = 32  # per step
takes = quack.takes


def logit_stats(
    x: Tensor,
    weight: Tensor,
    local_targets: Tensor,
    temperature: Tensor | None = None,
    *,
    keep: bool,
) -> tuple[Tensor | None, Tensor]:
    """x [n, D], weight [V, D] -> float32 logits [n, V] (None unless `keep`) and `reference.vocab_stats` [n, 4]."""
    n = len(x)
    columns = len(weight)
    z = x.new_empty((n, columns), dtype=torch.float32) if keep else None
    planes = x.new_empty((3, triton.cdiv(columns, TILE[1]), n), dtype=torch.float32)
    local = (local_targets >= 0) & (local_targets < columns)
    picked = torch.where(
        local, float("-inf"), torch.zeros_like(planes[0, 0])
    )  # -inf is not written
    inverse = None if temperature is None else temperature.to(torch.float32).reciprocal()
    targets = torch.where(local, local_targets, -1)  # compared by their low 32 bits
    importlib.import_module(quack.EPILOGUE).product(
        x, weight, targets, inverse, (z, planes.mT, picked), TILE
    )
    stats = torch.empty((n, 4), dtype=planes.dtype, device=planes.device)
    _combine[(triton.cdiv(n, ROWS),)](
        planes, picked, stats, n, planes.shape[1], planes.stride(0), ROWS, TILES
    )
    if temperature is not None:
        stats[:, ::3] *= temperature[:, None]  # m and t are untempered
    return z, stats


def logit_grads_(
    dz: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dw: Tensor | None, *, first: bool = False
) -> None:
    """dx = dz weight, dw += dz.T x. first: overwrite dw."""
    if dw is not None:
        quack.add_weight_grad_(dw, dz, x, first=first)
    quack.product_into(dx, dz, weight)


@triton.jit(do_not_specialize=["n", "tiles", "plane"])
def _combine(
    planes: tensor,
    picked: tensor,
    stats: tensor,
    n: tensor,
    tiles: tensor,
    plane: tensor,
    ROWS: constexpr,
    TILES: constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < n
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    u = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = planes + tile.to(tl.int64)[:, None] * n + row[None]
        valid = (tile < tiles)[:, None] & here[None]
        maxima = tl.load(at, mask=valid, other=float("-inf"))
        peak = tl.maximum(m, tl.max(maxima, 0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        behind = tl.where(maxima == float("-inf"), 0.0, maxima - base[None])
        shrink = tl.exp(behind)
        sums = tl.load(at + plane, mask=valid, other=0.0)
        moments = tl.load(at + 2 * plane, mask=valid, other=0.0)
        own = tl.where(m == float("-inf"), 0.0, m - base)
        u = tl.exp(own) * (u + s * own) + tl.sum(shrink * (moments + sums * behind), 0)
        s = tl.exp(own) * s + tl.sum(shrink * sums, 0)
        m = peak
    t = tl.load(picked + row, mask=here)
    tl.store(stats + row * 4, m, mask=here)
    tl.store(stats + row * 4 + 1, s, mask=here)
    tl.store(stats + row * 4 + 2, u, mask=here)
    tl.store(stats + row * 4 + 3, t, mask=here)
