"""Log-probability and entropy of tokens from vocabulary-sharded logits, in one pass and one collective.

Each rank reduces its own columns to four numbers a token, so the ranks exchange [T, 4] once and combine in rank order:

    d = (z - m) / tau     m = max z    s = sum e^d      u = sum d e^d           t = z_y if this rank holds column y, else 0
    D = (m - M) / tau     M = max m    S = sum s e^D    U = sum e^D (u + s D)
    logprob = (sum t - M) / tau - ln S                  entropy = ln S - U / S

Logits lose their maximum before they meet the temperature tau: at large logits the rounding of z / tau alone would cost digits.
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
    """What the gradient needs of each row, all [n]: the largest logit M, S, and U / S, the mean of d under p.

    They stay apart: the rounding of their sum, the log-sum-exp, would scale all of p = e^d / S at large logits.
    """

    peak: Tensor
    total: Tensor
    offset: Tensor


def combine(stats: Tensor, temperature: Tensor | None = None) -> tuple[TokenStats, Normalizer]:
    """Every rank's `vocab_stats` [ranks, n, 4] -> statistics and normalizer of the whole vocabulary, in rank order."""
    m, s, u, t = stats.unbind(-1)
    peak = m.amax(0)
    shift, chosen = torch.where(m == float("-inf"), 0.0, m - peak), t.sum(0) - peak
    if temperature is not None:
        shift, chosen = shift / temperature, chosen / temperature
    scale = torch.where(m == float("-inf"), 0.0, shift.exp())
    total = (s * scale).sum(0)
    moment = (scale * (u + s * shift)).sum(0)
    log_total, offset = total.log(), moment / total
    return TokenStats(chosen - log_total, log_total - offset), Normalizer(peak, total, offset)
