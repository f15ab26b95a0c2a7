"""From logits to a token: temperature, top-k, top-p, and the inverse of the cumulative distribution in float64.

Tokens stay in the vocabulary's order throughout. Cuts are thresholds, so equally likely tokens stay or go together and
no order of sorting can show. Only the cuts look for the largest weights. On GPUs `kernels.sampling_triton` draws by the same
rules where nothing is cut.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.rollout.base import SamplingParams

BLOCK = 256  # neighboring tokens that are first drawn together, then apart
CPU_ELEMENTS = 1 << 22  # logits that one pass touches, which bounds its temporaries
GPU_ELEMENTS = 1 << 24  # enough of them to fill a GPU
NUCLEUS_GUESSES = (64, 2048)  # how many likeliest tokens to look at before looking at all
BELOW_ONE = 1 - 2.0**-53


def draw(z: Tensor, uniforms: Tensor, params: SamplingParams, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One id a row of the logits z [n, V] by its uniform number [n], and its log-prob: both [n], the latter float64.

    The log-prob is that at the temperature, before cuts and bans; temperature 0 takes the likeliest id, the first among
    equals, and its log-prob at temperature 1. banned: `banned_of(params)`, for who has it on the device already. Given
    that and a top_p of 1, nothing is asked of the device, and nothing sent there.
    """
    if banned is None:
        banned = banned_of(params, z.device)
    drawn = [_draw(z[rows], uniforms[rows], params, banned) for rows in _row_blocks(z)]
    ids, log_probs = zip(*drawn, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def banned_of(params: SamplingParams, device: torch.device) -> Tensor:
    """The banned ids on a device."""
    return torch.tensor(params.banned_ids, dtype=torch.int64, device=device)


def mask_of(ids: Tensor, columns: int) -> Tensor:
    """A byte for each of the vocabulary's ids, 1 for these."""
    return torch.zeros(columns, dtype=torch.uint8, device=ids.device).index_fill_(0, ids, 1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index [n] at which the running sum of the weights [n, V] exceeds `uniforms` [n] of the total.

    In two steps: the block of the vocabulary, then the token in it. An index of weight 0 is never the first to exceed.
    """
    blocks = _in_blocks(weights)
    running = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms * running[:, -1]
    block = (running <= target[:, None]).sum(-1)
    before = F.pad(running, (1, 0)).gather(1, block[:, None])[:, 0]
    inside = blocks[torch.arange(len(block), device=block.device), block].to(torch.float64).cumsum(-1)
    # a block's sum and its running sum may round apart: what is left to find must lie inside
    rest = torch.minimum(target - before, inside[:, -1] * BELOW_ONE)
    return block * BLOCK + (inside <= rest[:, None]).sum(-1)


def cut(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """`weights` [n, V] with zeros outside the `top_k` likeliest, then outside the fewest that hold `top_p`."""
    if 0 < top_k < weights.shape[1]:
        weights = _at_least(weights, weights.topk(top_k, sorted=True).values[:, -1:])
    if top_p < 1:
        weights = _at_least(weights, _nucleus_floor(weights, top_p))
    return weights


def _draw(z: Tensor, uniforms: Tensor, params: SamplingParams, banned: Tensor) -> tuple[Tensor, Tensor]:
    scaled = z / params.temperature if params.temperature not in (0, 1) else z
    free = scaled.index_fill(-1, banned, -torch.inf) if params.banned_ids else scaled
    peak = free.amax(-1, keepdim=True)
    weights = (free - peak).exp_()
    if params.temperature == 0:
        ids = free.argmax(-1)
    else:
        ids = inverse_cdf(cut(weights, params.top_k, params.top_p), uniforms)
    total = _in_blocks(weights).sum(-1, dtype=torch.float64).sum(-1)
    picked = (scaled.gather(1, ids[:, None]) - peak)[:, 0].to(torch.float64)
    everything = total.log()
    if params.banned_ids:
        rest = (scaled[:, banned] - peak).to(torch.float64).logsumexp(-1)
        everything = torch.logaddexp(everything, rest)
    return ids, picked - everything


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """The smallest weight [n, 1] among the fewest likeliest tokens that hold `top_p` of a row's sum."""
    target = top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    for width in (*(n for n in NUCLEUS_GUESSES if n < weights.shape[1]), weights.shape[1]):
        largest = weights.topk(width, sorted=True).values
        running = largest.cumsum(-1, dtype=torch.float64)
        if bool((running[:, -1:] >= target).all()):
            break
    needed = (running < target).sum(-1, keepdim=True).clamp_(max=width - 1)  # all of them may round below the target
    return largest.gather(1, needed)


def _at_least(weights: Tensor, floor: Tensor) -> Tensor:
    return torch.where(weights >= floor, weights, 0.0)


def _in_blocks(weights: Tensor) -> Tensor:
    """[n, V] -> [n, blocks, BLOCK], zeros at the end."""
    missing = -weights.shape[1] % BLOCK
    return (F.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK))


def _row_blocks(z: Tensor) -> Iterator[slice]:
    n, columns = z.shape
    step = max(1, (CPU_ELEMENTS if z.device.type == "cpu" else GPU_ELEMENTS) // columns)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
