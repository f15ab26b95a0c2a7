"""Rows moved to places and back, each gradient the same way in reverse: nothing is added atomically, so equal inputs give
equal bits. The plain-torch ways behind `reference.permute` and `reference.unpermute`.
"""

from typing import Any

import torch
from torch import Tensor

STEPS = 3  # bits of a number of rows that count


def rounded(n: int) -> int:
    """At least n, and at most an eighth more: one of few numbers, for counts that differ from layer to layer. What is made for
    a shape, a plan of a product or a piece of memory, then serves many of them.
    """
    step = 1 << max(0, n.bit_length() - 1 - STEPS)
    return -(-n // step) * step


def count_rows(groups: Tensor, size: int, counted: Tensor | None = None) -> Tensor:
    """int64 [size]: how many rows, or counted rows, each group has. Unlike bincount it never asks a GPU for anything."""
    ones = torch.ones_like(groups) if counted is None else counted.to(groups.dtype)
    return torch.zeros(size, dtype=groups.dtype, device=groups.device).scatter_add_(0, groups, ones)


class Spread(torch.autograd.Function):
    """forward: row i // copies of x to place rows[i]. backward: the sum of what lies at a row's places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, copies: int, total: int | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.copies, ctx.gaps = copies, total is not None
        return _at_places(x, rows, copies, len(rows) if total is None else total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        back = _from_places(grads[0], rows, gaps=ctx.gaps)
        return back if ctx.copies == 1 else back.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class Collect(torch.autograd.Function):
    """forward: what lies at each place of `rows`. backward: back to there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.total = len(x)
        return _from_places(x, rows, gaps=len(x) < len(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _at_places(grads[0], rows, 1, ctx.total), None


def _at_places(x: Tensor, rows: Tensor, copies: int, total: int) -> Tensor:
    return x[inverse_of(rows, total) // copies]


def _from_places(x: Tensor, rows: Tensor, *, gaps: bool) -> Tensor:
    """x[rows], and zeros for the rows that x does not have, of which there are none without gaps."""
    if not gaps:
        return x[rows]
    if not len(x):
        return x.new_zeros((len(rows), *x.shape[1:]))
    nowhere = rows >= len(x)
    return x[rows.masked_fill(nowhere, 0)].masked_fill_(nowhere[:, None], 0)


def inverse_of(rows: Tensor, total: int | None = None) -> Tensor:
    """int64 [total]: which of `rows` is i, for each i below `total`; 0 for one that none is. Default: as many as rows."""
    size = len(rows)
    entries = torch.arange(size, device=rows.device)
    found = torch.zeros(size + 1, dtype=torch.int64, device=rows.device)
    return found.scatter_(0, rows.long().clamp(max=size), entries)[: size if total is None else total]
