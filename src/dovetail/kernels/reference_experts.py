"""Mixtures of experts in plain torch: routers, the order of tokens by expert, products by expert."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels.reference import count_rows, widened

KEPT_BITS = 3  # below the leading one


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [T, K] by expert, weight [E, K, N], offsets int [E]: ends of the experts' rows -> [T, N]."""
    ends = offsets.tolist()
    assert ends[-1] == len(x), f"the last expert's tokens end at {ends[-1]} of {len(x)}"
    lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
    return torch.cat([rows @ w for rows, w in zip(x.split(lengths), weight.unbind(), strict=True)])


def permute(
    x: Tensor, experts: Tensor, count: int, total: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of tokens by expert: x [T, D], experts int [T, K] -> [T K, D], rows [T K], ends [count].

    rows[t K + i]: the row of token t's i-th copy, T K if dropped (expert >= count). total: rows of the result.
    """
    flat = experts.flatten().clamp(max=count)
    rows = inverse_of(flat.argsort(stable=True)).masked_fill_(flat == count, len(flat))
    ends = count_rows(flat, count + 1)[:count].cumsum(0)
    return permute_tokens(x, rows, experts.shape[1], total), rows, ends


def permute_tokens(x: Tensor, rows: Tensor, copies: int, total: int | None = None) -> Tensor:
    size = len(rows) if total is None else total
    drops = total is not None
    return _MoveRows.apply(x, rows, copies, size, drops, False)


def unpermute(x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of tokens' copies: x [n, D], rows [T K], weights [T, K] -> [T, D]; no weights: rows [T, K]."""
    copies: Tensor = _MoveRows.apply(x, rows.flatten(), 1, len(x), len(x) < rows.numel(), True)
    if weights is None:
        return copies.unflatten(0, rows.shape).sum(1)
    if len(x) < rows.numel():
        weights = weights.masked_fill((rows >= len(x)).view(weights.shape), 0)
    return torch.bmm(weights.to(x.dtype)[:, None], copies.unflatten(0, weights.shape))[:, 0]


class _MoveRows(torch.autograd.Function):
    """forward: copies of x to `rows`, or if `back` x[rows]. backward: the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, copies: int, total: int, drops: bool, back: bool
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.copies = copies
        ctx.total = total
        ctx.drops = drops
        ctx.back = back
        return _gather(x, rows, drops) if back else x[inverse_of(rows, total) // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (rows,) = ctx.saved_tensors
        dx = dy[inverse_of(rows, ctx.total)] if ctx.back else _gather(dy, rows, ctx.drops)
        return (
            dx if ctx.copies == 1 else dx.unflatten(0, (-1, ctx.copies)).sum(1),
            None,
            None,
            None,
            None,
            None,
        )


def _gather(x: Tensor, rows: Tensor, drops: bool) -> Tensor:
    """Zeros for rows beyond x, if it `drops` some."""
    if not drops:
        return x[rows]
    if not len(x):
        return x.new_zeros((len(rows), *x.shape[1:]))
    dropped = rows >= len(x)
    return x[rows.masked_fill(dropped, 0)].masked_fill_(dropped[:, None], 0)


def inverse_of(rows: Tensor, total: int | None = None) -> Tensor:
    """int64 [total]: for each j the i with rows[i] = j, or 0."""
    size = len(rows)
    inverse = torch.zeros(size + 1, dtype=torch.int64, device=rows.device)
    inverse.scatter_(0, rows.long().clamp(max=size), torch.arange(size, device=rows.device))
    return inverse[: size if total is None else total]


def round_rows(n: int) -> int:
    """n rounded up by at most an eighth: few shapes."""
    step = 1 << max(0, n.bit_length() - 1 - KEPT_BITS)
    return -(-n // step) * step


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 [t, k]: columns of the k highest scores of [t, E], best first."""
    return scores.topk(k).indices


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, D] @ weight [E, D].T in `wide`."""
    return F.linear(widened(x), widened(weight))
