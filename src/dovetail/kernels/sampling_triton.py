"""Plain draws as Triton kernels: one pass over the logits, and a second kernel that goes on from its sums.

A program takes a piece of one row: its peak, and sums of weights under it by blocks of neighboring tokens, in float64. Joining
a row's pieces, a program draws its uniform number, finds the block, then the token, by the rules of `rollout.draw` and
`rollout.sampling`. A row's draw does not depend on other rows. Importing this needs triton.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(256)  # neighboring tokens that are first drawn together, then apart
PIECE = tl.constexpr(4096)  # tokens of a program
LOG2_E = tl.constexpr(math.log2(math.e))
BELOW_ONE = tl.constexpr(1 - 2.0**-53)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # those of SplitMix64, signed
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB - (1 << 64))
WARPS = 4


def draw(z: Tensor, streams: Tensor, positions: Tensor, temperature: float, banned: Tensor | None) -> Tensor:
    """One token a row of the logits z [n, V], float32 or halves, by the number of its stream [n] at its position [n].

    temperature: 0 takes the likeliest. banned: of all ids [V], which are never drawn; None: all may be. Returns [2, n],
    float64: ids, and their log-probs at the temperature (0: at 1), bans or not. Asks the device for nothing.
    """
    n, columns = z.shape
    pieces = triton.cdiv(columns, PIECE.value)
    found = torch.empty(2, n, dtype=torch.float64, device=z.device)
    if not n:
        return found
    peaks = torch.empty(n, pieces, 2, dtype=torch.float32, device=z.device)  # of what may be drawn, and of the rest
    firsts = torch.empty(n, pieces, dtype=torch.int32, device=z.device)
    per_piece = PIECE.value // BLOCK.value + 1  # sums of its blocks, and that of the rest
    sums = torch.empty(n, pieces, per_piece, dtype=torch.float64, device=z.device)
    z = z if z.stride(1) == 1 else z.contiguous()
    known, scale = (peaks, firsts, sums), float(temperature or 1)
    _weigh[(n, pieces)](z, banned, known, (z.stride(0), columns), scale, num_warps=WARPS)
    filled = triton.next_power_of_2(pieces)
    given = (streams.contiguous(), positions.contiguous())
    _pick[(n,)](
        z,
        banned,
        known,
        given,
        found,
        (z.stride(0), columns),
        scale,
        (pieces, filled, not temperature),
        num_warps=WARPS,
    )
    return found


@triton.jit
def _logits(z: tl.tensor, row: tl.tensor, at: tl.tensor, sizes: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """At the temperature; -inf beyond the vocabulary."""
    stride, columns = sizes
    x = tl.load(z + row * stride + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, scale)


@triton.jit
def _free(banned: tl.tensor, x: tl.tensor, at: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Of the logits x, those that may be drawn; -inf for the rest."""
    if banned is not None:
        x = tl.where(tl.load(banned + at, mask=at < columns, other=0) != 0, float("-inf"), x)
    return x


@triton.jit
def _under(x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Weights under a peak, zeros where all are -inf."""
    return tl.exp2((x - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2_E)


@triton.jit
def _weigh(z: tl.tensor, banned: tl.tensor, known: tl.tensor, sizes: tl.tensor, scale: tl.tensor) -> None:
    """One piece of one row. sizes: of a row's stride, and of the vocabulary."""
    BLOCKS: tl.constexpr = PIECE // BLOCK
    peaks, firsts, sums = known
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _logits(z, row, at, sizes, scale)
    free = _free(banned, x, at, sizes[1])
    peak = tl.max(tl.max(free, 1), 0)
    mine = row * tl.num_programs(1) + piece
    tl.store(peaks + 2 * mine, peak)
    tl.store(firsts + mine, tl.min(tl.min(tl.where(free == peak, at, sizes[1] - 1), 1), 0))
    by_block = tl.sum(_under(free, peak).to(tl.float64), 1)
    tl.store(sums + mine * (BLOCKS + 1) + tl.arange(0, BLOCKS), by_block)
    if banned is not None:
        rest = tl.where(free == x, float("-inf"), x)
        top = tl.max(tl.max(rest, 1), 0)
        tl.store(peaks + 2 * mine + 1, top)
        tl.store(sums + mine * (BLOCKS + 1) + BLOCKS, tl.sum(tl.sum(_under(rest, top).to(tl.float64), 1), 0))


@triton.jit
def _uniform(stream: tl.tensor, position: tl.tensor) -> tl.tensor:
    """A number in [0, 1), a multiple of 2^-53: `rollout.sampling.bits_at`."""
    x = (stream ^ position) + GAMMA
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST_FACTOR
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND_FACTOR
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _pick(
    z: tl.tensor,
    banned: tl.tensor,
    known: tl.tensor,
    given: tl.tensor,
    found: tl.tensor,
    sizes: tl.tensor,
    scale: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """One row. SHAPE: its pieces, the same filled up to a power of 2, whether the likeliest token is taken."""
    PIECES: tl.constexpr = SHAPE[0]
    BLOCKS: tl.constexpr = PIECE // BLOCK
    peaks, firsts, sums = known
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, SHAPE[1])
    mine = row * PIECES + each
    tops = tl.load(peaks + 2 * mine, mask=each < PIECES, other=float("-inf"))
    peak = tl.max(tops, 0)
    block = tl.arange(0, SHAPE[1] * BLOCKS)
    at_piece = row * PIECES + block // BLOCKS
    real = block < PIECES * BLOCKS
    shares = tl.exp((tl.load(peaks + 2 * at_piece, mask=real, other=float("-inf")) - peak).to(tl.float64))
    held = tl.load(sums + at_piece * (BLOCKS + 1) + block % BLOCKS, mask=real, other=0.0) * shares
    running = tl.cumsum(held, 0)
    total = tl.sum(tl.where(block == SHAPE[1] * BLOCKS - 1, running, 0.0), 0)
    if SHAPE[2]:
        first = tl.load(firsts + mine, mask=each < PIECES, other=0)
        token = tl.min(tl.where(tops == peak, first, sizes[1] - 1), 0)
    else:
        target = total * _uniform(tl.load(given[0] + row), tl.load(given[1] + row))
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), PIECES * BLOCKS - 1)
        before = tl.sum(tl.where(block == chosen - 1, running, 0.0), 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        free = _free(banned, _logits(z, row, at, sizes, scale), at, sizes[1])
        top = tl.load(peaks + 2 * (row * PIECES + chosen // BLOCKS))
        inside = tl.cumsum(_under(free, top).to(tl.float64) * tl.exp((top - peak).to(tl.float64)), 0)
        last = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, inside, 0.0), 0)
        rest = tl.minimum(target - before, last * BELOW_ONE)  # a block's sum and its running sum may round apart
        token = tl.minimum(chosen * BLOCK + tl.sum((inside <= rest).to(tl.int32), 0), sizes[1] - 1)
    everything = tl.log(total)
    if banned is not None:
        others = tl.load(peaks + 2 * mine + 1, mask=each < PIECES, other=float("-inf"))
        highest = tl.max(others, 0)
        share = tl.exp((others - tl.where(highest == float("-inf"), 0.0, highest)).to(tl.float64))
        there = tl.load(sums + mine * (BLOCKS + 1) + BLOCKS, mask=each < PIECES, other=0.0)
        besides = (highest - peak).to(tl.float64) + tl.log(tl.sum(there * share, 0))
        above = tl.maximum(everything, besides)
        everything = above + tl.log(tl.exp(everything - above) + tl.exp(besides - above))
    picked = (_logits(z, row, token, sizes, scale) - peak).to(tl.float64)
    tl.store(found + row, token.to(tl.float64))
    tl.store(found + tl.num_programs(0) + row, picked - everything)
