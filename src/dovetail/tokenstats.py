"""Log-probability and entropy of tokens from vocabulary-sharded logits, in one pass and one collective.

Each rank reduces its own columns to four numbers a token, so the ranks exchange [T, 4] once and combine in rank order:

    m = max z    s = sum e^(z - m)    u = sum e^(z - m) (z - m)    t = z_y if this rank holds column y, else 0
    M = max m    S = sum s e^(m - M)  U = sum e^(m - M) (u + s (m - M))
    logprob = sum t - M - ln S        entropy = ln S - U / S

The shifted first moment keeps large terms from canceling. Padded vocabulary columns are cut off before any of this.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenStats(NamedTuple):
    """Per-token log-probability of the target and entropy in nats, both [T] and both differentiable."""

    logprob: Tensor
    entropy: Tensor


class Normalizer(NamedTuple):
    """What the gradient needs beside the logits: log-sum-exp and the mean logit under p, both [n]."""

    lse: Tensor
    mean: Tensor


def combine(stats: Tensor) -> tuple[TokenStats, Normalizer]:
    """Every rank's `vocab_stats` [ranks, n, 4] -> statistics and normalizer of the whole vocabulary, in rank order."""
    m, s, u, t = stats.unbind(-1)
    peak = m.amax(0)
    shift = torch.where(m == float("-inf"), 0.0, m - peak)
    scale = torch.where(m == float("-inf"), 0.0, shift.exp())
    total = (s * scale).sum(0)
    moment = (scale * (u + s * shift)).sum(0)
    log_total, offset = total.log(), moment / total
    logprob = t.sum(0) - peak - log_total
    return TokenStats(logprob, log_total - offset), Normalizer(peak + log_total, peak + offset)
