"""Log-probability and entropy of tokens from vocabulary-sharded logits, in one pass and one collective.

Each rank reduces its own columns to four numbers a token, so the ranks exchange [T, 4] once and combine in rank order:

    m = max z    s = sum e^(z - m)    u = sum e^(z - m) (z - m)    t = z_y if this rank holds column y, else 0
    M = max m    S = sum s e^(m - M)  U = sum e^(m - M) (u + s (m - M))
    logprob = sum t - M - ln S        entropy = ln S - U / S

The shifted first moment keeps large terms from canceling. Padded vocabulary columns are cut off before any of this.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.comm import stack_over
from dovetail.kernels.reference import wide, widened
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Axis


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


class _TokenStats(torch.autograd.Function):
    """forward: one all_gather of [n, 4]. backward: dz = g [j = y] - p (g + h (z - mean)), no communication."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, local_targets: Tensor, axis: Axis, kernels: KernelSet) -> tuple[Tensor, Tensor]:
        stats, normalizer = combine(stack_over(kernels.vocab_stats(widened(z), local_targets), axis))
        ctx.save_for_backward(z, local_targets, *normalizer)
        ctx.kernels = kernels
        return stats.logprob, stats.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, local_targets, lse, mean = ctx.saved_tensors
        dz = z.to(wide(z.dtype), copy=True)
        ctx.kernels.vocab_grad_(dz, local_targets, lse, mean, *grads)
        return dz.to(z.dtype), None, None, None


def token_stats(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    first_column: int = 0,
    temperature: Tensor | float = 1.0,
    kernels: KernelSet | None = None,
) -> TokenStats:
    """Log-prob of `targets` [n] and entropy from this rank's logits [n, columns], which start at `first_column`.

    `temperature` is a number or [n]. Differentiable in the logits, which stay unchanged. Targets must lie in the
    vocabulary. The definition that `fused_head` agrees with, for logits that exist.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    scaled = logits / temperature
    return TokenStats(*_TokenStats.apply(scaled, targets - first_column, axis, kernels or KernelSet()))
