"""Sampling from logits: temperature, top-k, top-p, min-p, and the inverse CDF in float64.

Equally likely tokens stay or go together. Noise hashes (seed, step, row, sample, position), each by a round of SplitMix64.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dovetail.kernels.splitmix import STEP, Words, mixed, shifted, signed
from dovetail.sampler.base import SamplingParams

BLOCK = 256  # a draw picks a block of tokens, then a token
CPU_ELEMENTS = 1 << 22  # logits of one pass
GPU_ELEMENTS = 1 << 24
NUCLEUS_GUESSES = (64, 2048)  # tokens to sort before all are
BELOW_ONE = 1 - 2.0**-53


def uniforms(
    seed: int, step: int, rows: NDArray[np.int64], samples: NDArray[np.int64], position: int
) -> NDArray[np.float64]:
    """Returns noise [n] in [0, 1) for `rows` [n] and `samples` [n]."""
    keys = streams(seed, step, rows, samples)
    positions = np.full_like(keys, signed(position))
    bits = bits_at(keys, positions)
    return bits.astype(np.float64) * 2.0**-53


def streams(
    seed: int, step: int, rows: NDArray[np.int64], samples: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the hash [n] of all keys but the position."""
    state = np.zeros(rows.shape, np.int64)
    keys = (
        signed(seed),
        signed(step),
        rows.astype(np.int64),
        samples.astype(np.int64),
    )
    for key in keys:
        state = mixed((state ^ key) + signed(STEP))
    return state


def bits_at(streams: Words, positions: Words) -> Words:
    """Returns the noise times 2^53."""
    return shifted(mixed((streams ^ positions) + signed(STEP)), 11)


def draw(
    z: Tensor, uniforms: Tensor, params: SamplingParams, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns ids [n] of logits z [n, V] by noise [n], and log-probs before cuts and bans.

    With `banned`, top_p=1 never synchronizes.
    """
    if banned is None:
        banned = banned_of(params, z.device)
    elements = CPU_ELEMENTS if z.device.type == "cpu" else GPU_ELEMENTS
    rows = max(1, elements // z.shape[1])
    ids = []
    log_probs = []
    for part, noise in zip(z.split(rows), uniforms.split(rows), strict=True):
        part_ids, part_log_probs = _draw(part, noise, params, banned)
        ids.append(part_ids)
        log_probs.append(part_log_probs)
    return torch.cat(ids), torch.cat(log_probs)


def banned_of(params: SamplingParams, device: torch.device) -> Tensor:
    return torch.tensor(params.banned_ids, dtype=torch.int64, device=device)


def mask_of(ids: Tensor, columns: int) -> Tensor:
    """Returns uint8 [columns] with ones at `ids`."""
    mask = torch.zeros(columns, dtype=torch.uint8, device=ids.device)
    return mask.index_fill_(0, ids, 1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns the first index [n] where the running sum of weights [n, V] exceeds a target.

    uniforms: [n], the target's share of the total.
    """
    blocks = _in_blocks(weights)
    running = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms * running[:, -1]
    block = (running <= target[:, None]).sum(-1)
    before = F.pad(running, (1, 0)).gather(1, block[:, None])[:, 0]
    rows = torch.arange(len(block), device=block.device)
    inside = blocks[rows, block].to(torch.float64).cumsum(-1)
    # the block's sum and its running sum may round apart
    last = inside[:, -1] * BELOW_ONE
    rest = torch.minimum(target - before, last)
    place = (inside <= rest[:, None]).sum(-1)
    return block * BLOCK + place


def cut(weights: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Returns weights with zeros for tokens that are cut.

    These are below `min_p` of the largest, not among the `top_k` likeliest, then not among the
    fewest that hold `top_p`.
    """
    if min_p > 0:
        largest = weights.amax(-1, keepdim=True)
        weights = _at_least(weights, min_p * largest)
    if 0 < top_k < weights.shape[1]:
        likeliest = weights.topk(top_k, sorted=True).values
        weights = _at_least(weights, likeliest[:, -1:])
    if top_p < 1:
        weights = _at_least(weights, _nucleus_floor(weights, top_p))
    return weights


def _draw(
    z: Tensor, uniforms: Tensor, params: SamplingParams, banned: Tensor
) -> tuple[Tensor, Tensor]:
    scaled = z
    if params.temperature not in (0, 1):
        scaled = z / params.temperature
    allowed = scaled
    if params.banned_ids:
        allowed = scaled.index_fill(-1, banned, -torch.inf)
    peak = allowed.amax(-1, keepdim=True)
    weights = (allowed - peak).exp_()
    if params.temperature == 0:
        ids = allowed.argmax(-1)
    else:
        kept = cut(weights, params.top_k, params.top_p, params.min_p)
        ids = inverse_cdf(kept, uniforms)
    picked = scaled.gather(1, ids[:, None]) - peak
    sums = _in_blocks(weights).sum(-1, dtype=torch.float64)
    log_total = sums.sum(-1).log()
    if params.banned_ids:
        left_out = (scaled[:, banned] - peak).to(torch.float64)
        log_total = torch.logaddexp(log_total, left_out.logsumexp(-1))
    return ids, picked[:, 0].to(torch.float64) - log_total


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """Returns the smallest weight [n, 1] of the nucleus. Synchronizes."""
    target = top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    columns = weights.shape[1]
    guesses = [width for width in NUCLEUS_GUESSES if width < columns]
    for width in (*guesses, columns):
        largest = weights.topk(width, sorted=True).values
        running = largest.cumsum(-1, dtype=torch.float64)
        if bool((running[:, -1:] >= target).all()):
            break
    needed = (running < target).sum(-1, keepdim=True).clamp_(max=width - 1)
    return largest.gather(1, needed)


def _at_least(weights: Tensor, floor: Tensor) -> Tensor:
    return torch.where(weights >= floor, weights, 0.0)


def _in_blocks(weights: Tensor) -> Tensor:
    """Returns weights [n, V] as [n, blocks, BLOCK], padded with zeros."""
    missing = -weights.shape[1] % BLOCK
    if missing:
        weights = F.pad(weights, (0, missing))
    return weights.unflatten(1, (-1, BLOCK))
