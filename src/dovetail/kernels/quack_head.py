"""The head's products by quack, on Hopper: logits with their statistics, and both gradients. Importing this needs triton.

The first leaves three numbers a row for each tile of columns (`quack_epilogue`); one more kernel joins them. Logits that
nobody keeps are never in memory.
"""

import importlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import quack
from dovetail.kernels.quack import takes

__all__ = ["logit_grads_", "logit_stats", "takes"]

TILE = (128, 192)  # rows and columns: 12.2 ms with logits and 11.7 without, 8192 x 3584 x 152064; others 11.9 to 15.9
ROWS, TILES = 32, 32  # that a step of a program joins


def logit_stats(
    x: Tensor, weight: Tensor, local_targets: Tensor, temperature: Tensor | None = None, *, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """x [n, D], weight [V, D] -> float32 logits [n, V], or None where they are not to be kept, and their statistics [n, 4].

    What these are, and of what: `reference.vocab_stats`. They are the same, bit for bit, whether or not logits are kept.
    """
    n, columns = len(x), len(weight)
    z = x.new_empty((n, columns), dtype=torch.float32) if keep else None
    planes = x.new_empty((3, triton.cdiv(columns, TILE[1]), n), dtype=torch.float32)
    mine = (local_targets >= 0) & (local_targets < columns)
    picked = torch.where(mine, float("-inf"), torch.zeros_like(planes[0, 0]))  # what is -inf is not written
    inverse = None if temperature is None else temperature.to(torch.float32).reciprocal()
    ours = torch.where(mine, local_targets, -1)  # they are compared by their last 32 bits
    importlib.import_module(quack.EPILOGUE).product(x, weight, ours, inverse, (z, planes.mT, picked), TILE)
    stats = join(planes, picked)
    if temperature is not None:
        stats[:, ::3] *= temperature[:, None]  # m and t are of logits before the temperature
    return z, stats


def logit_grads_(dz: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dw: Tensor | None, *, first: bool = False) -> None:
    """What a gradient dz [n, V] of logits asks of x [n, D], written to dx, and of weight [V, D], added to dw where there is one.

    The first one finds nothing in dw.
    """
    if dw is not None:
        quack.add_weight_grad_(dw, dz, x, first=first)
    quack.product_into(dx, dz, weight)


def join(planes: Tensor, picked: Tensor) -> Tensor:
    """m, s, u of each tile [3, tiles, n] and t [n] -> m, s, u, t of the whole rows [n, 4], summed in the order of tiles."""
    _three, tiles, n = planes.shape
    stats = torch.empty((n, 4), dtype=planes.dtype, device=planes.device)
    _join[(triton.cdiv(n, ROWS),)](planes, picked, stats, n, tiles, planes.stride(0), ROWS, TILES)
    return stats


@triton.jit(do_not_specialize=["n", "tiles", "plane"])
def _join(
    planes: tl.tensor,
    picked: tl.tensor,
    stats: tl.tensor,
    n: tl.tensor,
    tiles: tl.tensor,
    plane: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Some rows: m, s and u of some tiles at a time, rescaled whenever these raise the maximum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < n
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    u = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = planes + tile.to(tl.int64)[:, None] * n + row[None]
        there = (tile < tiles)[:, None] & here[None]
        maxima = tl.load(at, mask=there, other=float("-inf"))
        peak = tl.maximum(m, tl.max(maxima, 0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        behind = tl.where(maxima == float("-inf"), 0.0, maxima - base[None])
        shrink = tl.exp(behind)
        sums = tl.load(at + plane, mask=there, other=0.0)
        moments = tl.load(at + 2 * plane, mask=there, other=0.0)
        own = tl.where(m == float("-inf"), 0.0, m - base)
        u = tl.exp(own) * (u + s * own) + tl.sum(shrink * (moments + sums * behind), 0)
        s = tl.exp(own) * s + tl.sum(shrink * sums, 0)
        m = peak
    t = tl.load(picked + row, mask=here)
    tl.store(stats + row * 4, m, mask=here)
    tl.store(stats + row * 4 + 1, s, mask=here)
    tl.store(stats + row * 4 + 2, u, mask=here)
    tl.store(stats + row * 4 + 3, t, mask=here)
