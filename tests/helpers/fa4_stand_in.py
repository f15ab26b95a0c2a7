"""Stands for flash-attn-4 on a CPU: its two functions, by their parameter names, computed by the formulas of attention.

As the real ones they leave autograd alone, so both directions are written out; and they take a pack [T, heads, C] with
`cu_seqlens`, or a dense batch [B, n, heads, C] without.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.kernels.fa4 import INTERFACE


class StandIn(ModuleType):
    """The module `flash_attn.cute.interface`, and what was asked of it."""

    def __init__(self) -> None:
        super().__init__(INTERFACE)
        self.calls: Counter[str] = Counter()
        self.deterministic = False
        self.computes = True  # or its forward pass gives zeros
        self.dense = 0  # calls
        self.forms: set[tuple[int, bool | None, bool, bool]] = (
            set()
        )  # what the package compiles a kernel for, of the forward pass

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any
    ) -> tuple[Tensor, Tensor, None, None, None]:
        self.calls["forward"] += 1
        assert return_lse and not any(0 in x.stride() for x in (q, k, v))
        self.forms.add(
            (q.ndim, given.pop("pack_gqa"), given["window_size_left"] is None, _many(given))
        )
        if not self.computes:
            lse = q.new_zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse, None, None, None
        if q.ndim == 4:
            self.dense += 1
            (a, b, c), ends = _packed(q, k, v)
            out, lse, *_ = self._flash_attn_fwd(
                a, b, c, return_lse=True, pack_gqa=None, **given, **ends
            )
            self.calls["forward"] -= 1
            return (
                out.view(*q.shape[:3], -1),
                lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous(),
                None,
                None,
                None,
            )
        out, lse = (
            q.new_empty(*q.shape[:2], v.shape[2]),
            q.new_empty(q.shape[1], len(q), dtype=torch.float32),
        )
        for i, j, scores in _scores(q, k, **given):
            lse[:, i] = scores.logsumexp(-1).to(torch.float32)
            out[i] = (scores.softmax(-1) @ _shared(v[j], q.shape[1])).transpose(0, 1).to(q.dtype)
        return out, lse, None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        assert 0 not in dout.stride()
        if q.ndim == 4:
            self.dense += 1
            (a, b, c), ends = _packed(q, k, v)
            rows = lse.transpose(0, 1).flatten(1)
            grads = self._flash_attn_bwd(
                a, b, c, out.flatten(0, 1), dout.flatten(0, 1), rows, **given, **ends
            )
            return tuple(x.view(like.shape) for x, like in zip(grads, (q, k, v), strict=True))
        self.calls["backward"] += 1
        self.deterministic = given.pop("deterministic")
        heads, wide = q.shape[1], torch.float64
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
        for i, j, scores in _scores(q, k, **given):
            weights = (scores - lse[:, i, None]).exp()
            up, mixed = (x[i].transpose(0, 1).to(wide) for x in (dout, out))
            inner = (
                weights
                * (up @ _shared(v[j], heads).mT - (up * mixed).sum(-1, keepdim=True))
                * q.shape[2] ** -0.5
            )
            dq[i] = (inner @ _shared(k[j], heads)).transpose(0, 1)
            dk[j] = _summed(inner.mT @ q[i].transpose(0, 1).to(wide), k.shape[1])
            dv[j] = _summed(weights.mT @ up, k.shape[1])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _many(given: dict[str, Any]) -> bool:
    """Whether the package takes a table to look tiles up in: `BIN_BATCH_SEARCH_THRESH` of its interface."""
    return "cu_seqlens_q" in given and len(given["cu_seqlens_q"]) - 1 > 256


def _packed(*three: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """A dense batch's q, k and v as a pack, and where its sequences lie."""
    ends: dict[str, Any] = {}
    for x, which in zip(three, "qk", strict=False):
        batch, n = x.shape[:2]
        ends |= {
            f"cu_seqlens_{which}": torch.arange(batch + 1, dtype=torch.int32) * n,
            f"max_seqlen_{which}": n,
        }
    q, k, v = (x.flatten(0, 1) for x in three)
    return (q, k, v), ends


def _scores(q: Tensor, k: Tensor, **given: Any) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each sequence: its queries, its keys, and the scores [H, n, m], -inf where a query does not look."""
    ends = [given.pop(f"cu_seqlens_{x}") for x in "qk"]
    longest = [given.pop(f"max_seqlen_{x}") for x in "qk"]
    left, right = given.pop("window_size_left"), given.pop("window_size_right")
    assert given == {"causal": True} and (left is None) == (right is None) and right in (None, 0)
    assert all(
        x.dtype == torch.int32 and int(x.diff().max()) <= n
        for x, n in zip(ends, longest, strict=True)
    )
    for (a, b), (c, d) in zip(*(pairwise(x.tolist()) for x in ends), strict=True):
        if a == b:
            continue
        apart = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)[None, :]
        hidden = (apart < 0) if left is None else (apart < 0) | (apart > left)
        scores = (
            q[a:b].transpose(0, 1).to(torch.float64)
            @ _shared(k[c:d], q.shape[1]).mT
            * q.shape[2] ** -0.5
        )
        yield slice(a, b), slice(c, d), scores.masked_fill(hidden, float("-inf"))


def _shared(x: Tensor, heads: int) -> Tensor:
    """[m, G, C] -> [H, m, C] in float64."""
    return x.to(torch.float64).repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """[H, m, C] -> [m, G, C], over the queries' heads that share one."""
    return x.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)


@contextmanager
def installed() -> Iterator[StandIn]:
    """The package is there, and is this one."""
    with pytest.MonkeyPatch.context() as patch:
        module = StandIn()
        patch.setitem(sys.modules, INTERFACE, module)
        yield module
