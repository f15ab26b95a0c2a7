"""Divergences of a student's distribution p from a teacher's q, on one rank's columns, in plain torch.

a = log p, b = log q, m = beta q + (1 - beta) p (Agarwal et al. 2024, eq. 1):

    kind         sums over columns                        divergence                      its gradient in z x temperature
    forward_kl   A = sum q (b - a), B = 0                 A                               p - q
    reverse_kl   A = 0, B = sum p (a - b)                 B                               p (a - b - B)
    jsd          A = sum q (b - log m), B = sum p (a - log m)   beta A + (1 - beta) B     (1 - beta) p (a - log m - B)

p - q, q - p, for jsd m - q and m - p are added to the terms: they sum to 0 and cancel the normalizer's rounding.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dovetail.kernels.reference import row_blocks, wide

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


class Divergence(NamedTuple):
    kind: Kind
    beta: float = 0.5  # of jsd

    def of(self, first: Tensor, second: Tensor) -> Tensor:
        weights = {
            "forward_kl": (1.0, 0.0),
            "reverse_kl": (0.0, 1.0),
            "jsd": (self.beta, 1.0 - self.beta),
        }[self.kind]
        return weights[0] * first + weights[1] * second


class Pair(NamedTuple):
    """Teacher's logits w [n, V]; maxima and sums [n] of both whole vocabularies; offset: the student's."""

    w: Tensor
    peak: Tensor
    total: Tensor
    offset: Tensor
    teacher_peak: Tensor
    teacher_total: Tensor
    temperature: Tensor | None = None


def divergence_sums(z: Tensor, pair: Pair, divergence: Divergence) -> Tensor:
    """Logits z [n, V] -> A and B [n, 2] of these columns, in `wide`."""
    sums = torch.zeros((len(z), 2), dtype=wide(z.dtype), device=z.device)
    if z.shape[1]:
        for rows in row_blocks(z):
            a, b = _logs(z, pair, rows)
            to_q, to_p = _distances(a, b, divergence)
            p = a.exp()
            q = b.exp()
            third = p if divergence.kind == "forward_kl" else q
            if divergence.kind == "jsd":
                third = divergence.beta * q + (1.0 - divergence.beta) * p
            if divergence.kind != "reverse_kl":
                sums[rows, 0] = (q * to_q + (third - q)).sum(-1)
            if divergence.kind != "forward_kl":
                sums[rows, 1] = (p * to_p + (third - p)).sum(-1)
    return sums


def divergence_grad_(
    z: Tensor,
    pair: Pair,
    local_targets: Tensor,
    grads: tuple[Tensor, Tensor | None, Tensor],
    second: Tensor,
    divergence: Divergence,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Gradient [n, V] in `dtype` of logprob, entropy and divergence with `grads` [n]; second: B [n]. Overwrites z."""
    if z.shape[1] == 0:
        return z.to(dtype or z.dtype)
    g, h, k = (None if x is None else x[:, None] for x in grads)
    assert g is not None and k is not None
    local = (local_targets >= 0) & (local_targets < z.shape[1])
    index = torch.where(local, local_targets, 0)[:, None]
    at_target = torch.where(local[:, None], g, 0.0)
    entropy = (pair.total.log() - pair.offset)[:, None]
    for rows in row_blocks(z):
        a, b = _logs(z, pair, rows)
        p = a.exp()
        if divergence.kind == "forward_kl":
            grad = k[rows] * (p - b.exp())
        else:
            _, to_p = _distances(a, b, divergence)
            share = 1.0 if divergence.kind == "reverse_kl" else 1.0 - divergence.beta
            grad = share * k[rows] * p * (to_p - second[rows, None])
        grad -= p * (g[rows] if h is None else g[rows] + h[rows] * (a + entropy[rows]))
        grad.scatter_add_(-1, index[rows], at_target[rows])
        z[rows] = grad if pair.temperature is None else grad.div_(pair.temperature[rows, None])
    return z.to(dtype or z.dtype)


def _logs(z: Tensor, pair: Pair, rows: slice) -> tuple[Tensor, Tensor]:
    """a and b, finite also at -inf."""
    logs = []
    for logits, peak, total in (
        (z, pair.peak, pair.total),
        (pair.w, pair.teacher_peak, pair.teacher_total),
    ):
        shifted = logits[rows].to(wide(z.dtype)) - peak[rows, None]
        if pair.temperature is not None:
            shifted /= pair.temperature[rows, None]
        shifted -= total[rows, None].log()
        logs.append(shifted.clamp_(min=torch.finfo(shifted.dtype).min / 4))
    return logs[0], logs[1]


def _distances(a: Tensor, b: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """(b - a, a - b), or for jsd (b - log m, a - log m), exact where p is near q."""
    r = b - a
    if divergence.kind != "jsd":
        return r, -r
    above = r > 0
    share = above.to(r.dtype) * (1.0 - 2.0 * divergence.beta) + divergence.beta
    near = torch.log1p(share * torch.expm1(-r.abs()))
    return torch.where(above, -near, r - near), torch.where(above, -r - near, -near)
