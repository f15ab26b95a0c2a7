"""Permutation of token rows in plain torch. No gradient is added atomically: equal inputs give equal bits."""

from typing import Any

import torch
from torch import Tensor

KEPT_BITS = 3  # of a rounded row count, below its leading one


def round_rows(n: int) -> int:
    """n rounded up by at most an eighth, to one of few numbers: plans and memory blocks made for a shape are reused."""
    step = 1 << max(0, n.bit_length() - 1 - KEPT_BITS)
    return -(-n // step) * step


def count_rows(groups: Tensor, size: int, counted: Tensor | None = None) -> Tensor:
    """int64 [size]: rows, or counted rows, of each group. Unlike bincount it never syncs with the host."""
    ones = torch.ones_like(groups) if counted is None else counted.to(groups.dtype)
    return torch.zeros(size, dtype=groups.dtype, device=groups.device).scatter_add_(0, groups, ones)


class PermuteTokens(torch.autograd.Function):
    """forward: y[rows[i]] = x[i // copies]. backward: dx[t] = the sum of dy over the copies of t."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, copies: int, total: int | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.copies, ctx.drops = copies, total is not None
        return _scatter(x, rows, copies, len(rows) if total is None else total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        dx = _gather(grads[0], rows, drops=ctx.drops)
        return dx if ctx.copies == 1 else dx.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class UnpermuteTokens(torch.autograd.Function):
    """forward: y[i] = x[rows[i]], 0 for a row that x does not have. backward: dx[rows[i]] = dy[i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.total = len(x)
        return _gather(x, rows, drops=len(x) < len(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _scatter(grads[0], rows, 1, ctx.total), None


def _scatter(x: Tensor, rows: Tensor, copies: int, total: int) -> Tensor:
    return x[inverse_of(rows, total) // copies]


def _gather(x: Tensor, rows: Tensor, *, drops: bool) -> Tensor:
    """x[rows]; drops: some rows are not in x, and give zeros."""
    if not drops:
        return x[rows]
    if not len(x):
        return x.new_zeros((len(rows), *x.shape[1:]))
    dropped = rows >= len(x)
    return x[rows.masked_fill(dropped, 0)].masked_fill_(dropped[:, None], 0)


def inverse_of(rows: Tensor, total: int | None = None) -> Tensor:
    """int64 [total]: the i with rows[i] = j for each j, 0 where there is none. Default total: len(rows)."""
    size = len(rows)
    entries = torch.arange(size, device=rows.device)
    inverse = torch.zeros(size + 1, dtype=torch.int64, device=rows.device)
    return inverse.scatter_(0, rows.long().clamp(max=size), entries)[: size if total is None else total]
