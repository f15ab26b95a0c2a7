"""Plain sampling as Triton kernels, by the rules of `sampler.sampling`."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

BLOCK = constexpr(256)  # tokens
PIECE = constexpr(4096)  # per program
LOG2_E = constexpr(math.log2(math.e))
BELOW_ONE = constexpr(1 - 2.0**-53)
GAMMA = constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # of SplitMix64, signed
FIRST_FACTOR = constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND_FACTOR = constexpr(0x94D049BB133111EB - (1 << 64))
WARPS = 4


class Shape(NamedTuple):
    pieces: int
    padded: int
    greedy: bool


def draw(
    z: Tensor, streams: Tensor, positions: Tensor, temperature: float, banned: Tensor | None
) -> Tensor:
    """A token per row of logits z [n, V], by the random number of stream [n] at position [n]. temperature 0: greedy.

    banned: mask [V]. Returns float64 [2, n]: ids, and log-probs at the temperature (0: at 1) over all ids.
    """
    n, columns = z.shape
    pieces = triton.cdiv(columns, PIECE.value)
    out = torch.empty(2, n, dtype=torch.float64, device=z.device)
    if not n:
        return out
    peaks = torch.empty(
        n, pieces, 2, dtype=torch.float32, device=z.device
    )  # of allowed and of banned tokens
    firsts = torch.empty(n, pieces, dtype=torch.int32, device=z.device)
    per_piece = PIECE.value // BLOCK.value + 1
    sums = torch.empty(n, pieces, per_piece, dtype=torch.float64, device=z.device)
    z = z if z.stride(1) == 1 else z.contiguous()
    stats = (peaks, firsts, sums)
    sizes = (z.stride(0), columns)
    scale = float(temperature or 1)
    _piece_stats[(n, pieces)](z, banned, stats, sizes, scale, num_warps=WARPS)
    noise = (streams.contiguous(), positions.contiguous())
    shape = Shape(pieces, triton.next_power_of_2(pieces), not temperature)
    _sample[(n,)](z, banned, stats, noise, out, sizes, scale, shape, num_warps=WARPS)
    return out


@triton.jit
def _logits(z: tensor, row: tensor, at: tensor, sizes: tensor, scale: tensor) -> tensor:
    stride, columns = sizes
    x = tl.load(z + row * stride + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, scale)


@triton.jit
def _allowed(banned: tensor, x: tensor, at: tensor, columns: tensor) -> tensor:
    if banned is not None:
        x = tl.where(tl.load(banned + at, mask=at < columns, other=0) != 0, float("-inf"), x)
    return x


@triton.jit
def _weights(x: tensor, peak: tensor) -> tensor:
    """exp(x - peak), 0 where all are -inf."""
    return tl.exp2((x - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2_E)


@triton.jit
def _piece_stats(z: tensor, banned: tensor, stats: tensor, sizes: tensor, scale: tensor) -> None:
    BLOCKS: constexpr = PIECE // BLOCK
    peaks, firsts, sums = stats
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _logits(z, row, at, sizes, scale)
    allowed = _allowed(banned, x, at, sizes[1])
    peak = tl.max(tl.max(allowed, 1), 0)
    slot = row * tl.num_programs(1) + piece
    tl.store(peaks + 2 * slot, peak)
    tl.store(firsts + slot, tl.min(tl.min(tl.where(allowed == peak, at, sizes[1] - 1), 1), 0))
    by_block = tl.sum(_weights(allowed, peak).to(tl.float64), 1)
    tl.store(sums + slot * (BLOCKS + 1) + tl.arange(0, BLOCKS), by_block)
    if banned is not None:
        rest = tl.where(allowed == x, float("-inf"), x)
        top = tl.max(tl.max(rest, 1), 0)
        tl.store(peaks + 2 * slot + 1, top)
        tl.store(
            sums + slot * (BLOCKS + 1) + BLOCKS,
            tl.sum(tl.sum(_weights(rest, top).to(tl.float64), 1), 0),
        )


@triton.jit
def _uniform(stream: tensor, position: tensor) -> tensor:
    """Uniform noise in [0, 1): `sampler.sampling.bits_at`."""
    x = (stream ^ position) + GAMMA
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST_FACTOR
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND_FACTOR
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _sample(
    z: tensor,
    banned: tensor,
    stats: tensor,
    noise: tensor,
    out: tensor,
    sizes: tensor,
    scale: tensor,
    SHAPE: constexpr,
) -> None:
    BLOCKS: constexpr = PIECE // BLOCK
    peaks, firsts, sums = stats
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, SHAPE.padded)
    slot = row * SHAPE.pieces + piece
    tops = tl.load(peaks + 2 * slot, mask=piece < SHAPE.pieces, other=float("-inf"))
    peak = tl.max(tops, 0)
    block = tl.arange(0, SHAPE.padded * BLOCKS)
    block_slot = row * SHAPE.pieces + block // BLOCKS
    real = block < SHAPE.pieces * BLOCKS
    shares = tl.exp(
        (tl.load(peaks + 2 * block_slot, mask=real, other=float("-inf")) - peak).to(tl.float64)
    )
    weights = (
        tl.load(sums + block_slot * (BLOCKS + 1) + block % BLOCKS, mask=real, other=0.0) * shares
    )
    running = tl.cumsum(weights, 0)
    total = tl.sum(tl.where(block == SHAPE.padded * BLOCKS - 1, running, 0.0), 0)
    if SHAPE.greedy:
        first = tl.load(firsts + slot, mask=piece < SHAPE.pieces, other=0)
        token = tl.min(tl.where(tops == peak, first, sizes[1] - 1), 0)
    else:
        target = total * _uniform(tl.load(noise[0] + row), tl.load(noise[1] + row))
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), SHAPE.pieces * BLOCKS - 1)
        before = tl.sum(tl.where(block == chosen - 1, running, 0.0), 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        allowed = _allowed(banned, _logits(z, row, at, sizes, scale), at, sizes[1])
        top = tl.load(peaks + 2 * (row * SHAPE.pieces + chosen // BLOCKS))
        inside = tl.cumsum(
            _weights(allowed, top).to(tl.float64) * tl.exp((top - peak).to(tl.float64)), 0
        )
        last = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, inside, 0.0), 0)
        rest = tl.minimum(target - before, last * BELOW_ONE)  # sums may round differently
        token = tl.minimum(chosen * BLOCK + tl.sum((inside <= rest).to(tl.int32), 0), sizes[1] - 1)
    log_total = tl.log(total)
    if banned is not None:
        banned_peaks = tl.load(peaks + 2 * slot + 1, mask=piece < SHAPE.pieces, other=float("-inf"))
        banned_peak = tl.max(banned_peaks, 0)
        share = tl.exp(
            (banned_peaks - tl.where(banned_peak == float("-inf"), 0.0, banned_peak)).to(tl.float64)
        )
        banned_sums = tl.load(
            sums + slot * (BLOCKS + 1) + BLOCKS, mask=piece < SHAPE.pieces, other=0.0
        )
        log_banned = (banned_peak - peak).to(tl.float64) + tl.log(tl.sum(banned_sums * share, 0))
        larger = tl.maximum(log_total, log_banned)
        log_total = larger + tl.log(tl.exp(log_total - larger) + tl.exp(log_banned - larger))
    picked = (_logits(z, row, token, sizes, scale) - peak).to(tl.float64)
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + tl.num_programs(0) + row, picked - log_total)
