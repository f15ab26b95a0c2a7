"""Context parallelism by gathered keys or exchanged heads, and losses of whole sequences.

Of L lines (groups that exchange heads) the i-th holds the i-th and i-th last of 2 L chunks of tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats
from dovetail.batch.micro import ContextShard, MicroBatch
from dovetail.batch.packed import PackedBatch, cumulative, to_device
from dovetail.kernels.reference import Spans, pad_values
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.axes import Axis, ContextAxes
from dovetail.parallel.collectives import (
    all_reduce,
    begin_sum_in_order,
    gather_mirrored,
    heads_to_tokens,
    tokens_to_heads,
)


def share_keys(
    k: Tensor, v: Tensor, stretches: Sequence[slice], axis: Axis, add: Callable[..., Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    """k and v [t, G, C] -> keys and values [n, G, C] of each stretch of all lines' tokens, read-only."""
    out = _SharedKeys.apply(k, v, tuple(stretches), axis, add)
    keys = out[::2]
    values = out[1::2]
    return zip(keys, values, strict=True)


class _SharedKeys(torch.autograd.Function):
    """forward: all_gather, sliced into stretches. backward: sums by line, all_to_all, `add` in order."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        stretches: tuple[slice, ...],
        axis: Axis,
        add: Callable[..., Tensor],
    ) -> tuple[Tensor, ...]:
        ctx.stretches = stretches
        ctx.axis = axis
        ctx.add = add
        ctx.own = len(k)
        both = torch.cat((k, v), dim=1)
        gathered = gather_mirrored(both, axis)
        out: list[Tensor] = []
        for stretch in stretches:
            out += gathered[stretch].chunk(2, dim=1)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        parts = scatter_kv_grads(grads, ctx.stretches, ctx.own, ctx.axis.size)
        dk, dv = begin_sum_in_order(parts, ctx.axis, ctx.add).wait()
        return dk, dv, None, None, None


def scatter_kv_grads(
    grads: Sequence[Tensor], stretches: Sequence[slice], own: int, lines: int
) -> Tensor:
    """Gradients of stretches [n, G, C] -> sums [lines, 2, own, G, C]."""
    size = own // 2
    first = grads[0]
    out = first.new_empty((lines, 2, own, *first.shape[1:]))
    ends = {*range(0, lines * own + 1, size)}
    for stretch in stretches:
        ends |= {stretch.start, stretch.stop}
    for start, stop in pairwise(sorted(ends)):
        chunk, at = divmod(start, size)
        line = chunk
        if chunk >= lines:  # the mirrored half
            line = 2 * lines - 1 - chunk
            at += size
        end = at + stop - start
        for kind, total in enumerate(out[line, :, at:end]):
            parts = []
            for grad, stretch in zip(grads[kind::2], stretches, strict=True):
                if stretch.start <= start and stop <= stretch.stop:
                    low = start - stretch.start
                    high = stop - stretch.start
                    parts.append(grad[low:high])
            if not parts:
                total.zero_()
                continue
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
    return out


class Chunk(NamedTuple):
    """The tokens of this rank's queries, the keys that they see, and both as packed sequences."""

    queries: slice
    keys: slice
    q_spans: Spans
    k_spans: Spans


@dataclass(frozen=True)
class SharedAttention:
    chunks: tuple[Chunk, ...]
    axes: ContextAxes
    kernels: KernelSet

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        v_dim = v.shape[-1]
        v = pad_values(k, v)
        q, k, v = self._all_tokens(q, k, v)
        queries: Sequence[Tensor] = (q,)
        keys: Iterable[tuple[Tensor, Tensor]] = ((k, v),)
        kernels = self.kernels
        gather = self.axes.gather
        if gather.size > 1:
            lengths = [chunk.queries.stop - chunk.queries.start for chunk in self.chunks]
            queries = q.split(lengths)
            stretches = [chunk.keys for chunk in self.chunks]
            keys = share_keys(k, v, stretches, gather, kernels.sum_deterministic)
        parts = []
        for rows, (key, value), chunk in zip(queries, keys, self.chunks, strict=True):
            spans = (chunk.q_spans, chunk.k_spans)
            part = kernels.attention(rows, key, value, *spans, window)
            parts.append(part)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = heads_to_tokens(out, self.axes.ulysses)
        return out[..., :v_dim]

    def _all_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Some heads of the Ulysses group's tokens; too few KV heads are repeated."""
        size = self.axes.ulysses.size
        if size == 1:
            return q, k, v
        repeats = size // k.shape[1]
        if repeats > 1:
            k = k.repeat_interleave(repeats, dim=1)
            v = v.repeat_interleave(repeats, dim=1)
        parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
        heads = [part.shape[2] for part in parts]
        qkv = torch.cat(parts, dim=2)
        qkv = tokens_to_heads(qkv.flatten(1, 2), self.axes.ulysses)
        return qkv.split(heads, dim=1)


def cut_chunks(
    lengths: Sequence[int], share: ContextShard, device: torch.device
) -> tuple[Chunk, ...]:
    ends = cumulative(lengths).tolist()
    total = ends[-1]
    if share.groups == 1:
        spans = _spans(lengths, device)
        every = slice(0, total)
        return (Chunk(every, every, spans, spans),)
    size = total // (2 * share.groups)
    chunks = []
    for at, chunk in enumerate(share.chunks):
        start = chunk * size
        stop = start + size
        first: int | None = None  # of the keys
        queries = []
        keys = []
        for begin, end in pairwise(ends):
            if begin < stop and end > start:
                first = begin if first is None else first
                last = min(end, stop)
                queries.append(last - max(begin, start))
                keys.append(last - begin)
        low = at * size
        mine = slice(low, low + size)
        seen = slice(first, stop)
        chunks.append(Chunk(mine, seen, _spans(queries, device), _spans(keys, device)))
    return tuple(chunks)


def _spans(lengths: Sequence[int], device: torch.device) -> Spans:
    cu_seqlens = cumulative(lengths)
    return Spans(to_device(cu_seqlens, device), tuple(lengths))


@dataclass(frozen=True)
class SequenceGather:
    """A loss of whole sequences on every cp rank; the first returns its value. forward all_reduce of inputs, backward none."""

    loss: LossFn
    micro: MicroBatch
    axis: Axis
    separable: ClassVar[bool] = False

    def __call__(self, stats: TokenStats | Tensor, _: PackedBatch, /) -> Loss:
        whole: Tensor | TokenStats
        if isinstance(stats, Tensor):
            whole = self._gather(stats)
        else:
            whole = TokenStats(*map(self._gather, stats))
        total, count, metrics = self.loss(whole, self.micro.all_counted)
        if self.axis.rank == 0:
            return Loss(total, count, metrics)
        zeros = {name: Sum(0 * s.total, 0 * s.count) for name, s in metrics.items()}
        return Loss(total - total.detach(), 0 * count, zeros)

    def _gather(self, x: Tensor) -> Tensor:
        whole = x.new_zeros(len(self.micro.all_counted))
        whole = whole.index_copy(0, self.micro.local, x)
        return all_reduce(whole, self.axis)
