"""Log-probability and entropy of tokens from vocabulary-sharded logits, in one pass and one collective.

Each rank reduces its own columns to four numbers a token, so the ranks exchange [T, 4] once and combine in rank order:

    m = max z    s = sum e^(z - m)    u = sum e^(z - m) (z - m)    t = z_y if this rank holds column y, else 0
    M = max m    S = sum s e^(m - M)  U = sum e^(m - M) (u + s (m - M))
    logprob = sum t - M - ln S        entropy = ln S - U / S

    backward   dz = g [j = y] - p (g + h (z - mu)),   mu = M + U / S,   no communication

(kernels.md section 1.1; the shifted first moment keeps large terms from cancelling.)
"""

from typing import NamedTuple

from torch import Tensor


class TokenStats(NamedTuple):
    """Per-token log-probability of the target and entropy in nats, both [T] and both differentiable."""

    logprob: Tensor
    entropy: Tensor
