"""Keys and values of all lines of a cp axis in token order, and their gradients back to the ranks they are of.

A line holds two chunks of c tokens: of L lines the i-th holds the i-th of 2 L chunks, and the i-th last. Let M be the bytes
of the keys and values of all T = 2 L c tokens. A rank then reads or writes, beside attention and what the network brings:

    forward    2 M / L            for the join of its own keys and values
               M                  for the later half turned round, while the earlier half still comes (copy engines: M / L)
    backward   (2 + 1 / (2 L)) M  for the gradients of both stretches of keys of one document, laid down as they leave
               (1 + 1 / L) M      for the sum of what comes
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.arch.spec import RopeSpec
from dovetail.batch.micro import ContextShard, MicroBatch
from dovetail.batch.packed import carried, cumulative
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans, pad_values
from dovetail.kernels.registry import KernelSet
from dovetail.nn.beside import DelayedWgrad
from dovetail.nn.rope import rope_tables
from dovetail.parallel.collectives import begin_sum_in_order, gather_mirrored, heads_to_tokens, nothing, tokens_to_heads
from dovetail.parallel.mesh import Axis, ContextAxes, Mesh


def share_keys(
    k: Tensor,
    v: Tensor,
    stretches: Sequence[slice],
    axis: Axis,
    add: Callable[..., Tensor],
    during: Callable[[], None] = nothing,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This line's k and v [t, G, C] -> the keys and the values of each stretch [n, G, C] of all lines' T tokens.

    They come one by one, as far as they have arrived: those of the first half of all tokens before the second half has. They
    are views of one tensor, and nobody may write to them. Gradients are rounded to k's dtype on the rank whose
    queries ask for them and then summed by `add`, [L, ...] -> [...], in rank order. `during` goes on while they travel.
    """
    *found, arrive = _SharedKeys.apply(k, v, tuple(stretches), axis, add, during)
    half, arrived = len(k) * axis.size // 2, False
    for stretch, key, value in zip(stretches, found[::2], found[1::2], strict=True):
        if stretch.stop > half and not arrived:
            arrive()
            arrived = True
        yield key, value


class _SharedKeys(torch.autograd.Function):
    """forward: all_gather, cut into stretches. backward: the stretches' gradients laid together, all_to_all, sum."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        stretches: tuple[slice, ...],
        axis: Axis,
        add: Callable[..., Tensor],
        during: Callable[[], None],
    ) -> tuple[Any, ...]:
        ctx.stretches, ctx.axis, ctx.add, ctx.during, ctx.own = stretches, axis, add, during, len(k)
        everything, arrive = gather_mirrored(torch.cat((k, v), dim=1), axis)
        return *(x for stretch in stretches for x in everything[stretch].chunk(2, dim=1)), arrive

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        parts = scatter_kv_grads(grads[:-1], ctx.stretches, ctx.own, ctx.axis.size)
        begun = begin_sum_in_order(parts, ctx.axis, ctx.add)
        ctx.during()
        dk, dv = begun.take()
        return dk, dv, None, None, None, None


def scatter_kv_grads(grads: Sequence[Tensor], stretches: Sequence[slice], own: int, lines: int) -> Tensor:
    """The gradients of the keys and of the values of each stretch, [n, G, C] each -> [lines, 2, own, G, C]: by line, of keys
    and of values, by its tokens. Where stretches overlap they are added, and zero where there is none.

    Every number is read and written once, and every piece is dense in what is written.
    """
    size = own // 2
    out = grads[0].new_empty((lines, 2, own, *grads[0].shape[1:]))
    ends = {end for stretch in stretches for end in (stretch.start, stretch.stop)}
    for start, stop in pairwise(sorted({*range(0, lines * own + 1, size), *ends})):
        chunk, at = divmod(start, size)
        line, at = (chunk, at) if chunk < lines else (2 * lines - 1 - chunk, at + size)
        for kind, place in enumerate(out[line, :, at : at + stop - start]):
            _add_into(
                place,
                [
                    grad[start - stretch.start : stop - stretch.start]
                    for grad, stretch in zip(grads[kind::2], stretches, strict=True)
                    if stretch.start <= start and stop <= stretch.stop
                ],
            )
    return out


def _add_into(place: Tensor, parts: Sequence[Tensor]) -> None:
    """place = the sum of the parts, whatever was there."""
    if not parts:
        place.zero_()
    elif len(parts) == 1:
        place.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=place)
        for part in parts[2:]:
            place.add_(part)


@dataclass(frozen=True)
class PackedAttention:
    """Every token attends to its own sequence, up to itself; all tokens are here."""

    spans: Spans
    kernels: KernelSet

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, _beside: DelayedWgrad) -> Tensor:
        """q [T, H, C], k [T, G, C], v [T, G, Cv] -> [T, H, Cv]."""
        return self.kernels.attention(q, k, v, self.spans, self.spans, window)


class Chunk(NamedTuple):
    """Some neighboring queries and the stretch of keys that they see, cut into the sequences they belong to. A rank's first
    chunk begins with its first query, and the next where that one ends.
    """

    queries: slice
    keys: slice
    q_spans: Spans
    k_spans: Spans


@dataclass(frozen=True)
class SharedAttention:
    """Every token attends to its own sequence, up to itself; each rank of cp has some of the tokens."""

    chunks: tuple[Chunk, ...]
    axes: ContextAxes
    kernels: KernelSet

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, beside: DelayedWgrad) -> Tensor:
        """q [t, H, C], k [t, G, C], v [t, G, Cv] -> [t, H, Cv]. Keys and values travel as one.

        Of what the backward pass has beside its exchanges, the first takes one, and the last all that is left.
        """
        beside.awaited = k.requires_grad
        narrow, v = v.shape[-1], pad_values(k, v)
        q, k, v = self._all_tokens(q, k, v, beside)
        rows: Sequence[Tensor] = (q,)
        seen: Iterable[tuple[Tensor, Tensor]] = ((k, v),)
        if self.axes.gather.size > 1:
            rows = q.split([chunk.queries.stop - chunk.queries.start for chunk in self.chunks])
            keys = [chunk.keys for chunk in self.chunks]
            # where heads are exchanged too, theirs is the last exchange of the backward pass, and a larger one
            during = beside.rest if self.axes.ulysses.size == 1 else nothing
            seen = share_keys(k, v, keys, self.axes.gather, self.kernels.sum_deterministic, during)
        out = [
            self.kernels.attention(queries, *found, chunk.q_spans, chunk.k_spans, window)
            for queries, found, chunk in zip(rows, seen, self.chunks, strict=True)
        ]
        return heads_to_tokens(out[0] if len(out) == 1 else torch.cat(out), self.axes.ulysses, beside.one)[..., :narrow]

    def _all_tokens(self, q: Tensor, k: Tensor, v: Tensor, beside: DelayedWgrad) -> tuple[Tensor, ...]:
        """Some heads of all tokens of the Ulysses group, in one exchange. Too few KV heads are repeated."""
        size = self.axes.ulysses.size
        if size == 1:
            return q, k, v
        if (repeats := size // k.shape[1]) > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        parts = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
        heads = [part.shape[2] for part in parts]
        everything = torch.cat(parts, dim=2).flatten(1, 2)
        return tokens_to_heads(everything, self.axes.ulysses, beside.rest).split(heads, dim=1)


BatchAttention = PackedAttention | SharedAttention


@dataclass(frozen=True)
class BatchContext:
    """The context of training and scoring: the same for every layer."""

    cos: Tensor
    sin: Tensor
    attention: BatchAttention
    routes: Routes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, beside: DelayedWgrad) -> Tensor:
        return self.attention.attend(q, k, v, window, beside)


def context_of(micro: MicroBatch, rope: RopeSpec, dtype: torch.dtype, mesh: Mesh, kernels: KernelSet) -> BatchContext:
    """The context of this rank's tokens of a micro-batch."""
    batch, some = micro.batch, None if micro.share.size == 1 else micro.order
    cos, sin = rope_tables(rope, batch.positions, batch.lengths, dtype, some)
    return BatchContext(cos, sin, attention_of(micro, mesh, kernels), micro.routes or Routes())


def attention_of(micro: MicroBatch, mesh: Mesh, kernels: KernelSet) -> BatchAttention:
    """What this rank's tokens of a micro-batch attend to."""
    batch, share = micro.batch, micro.share
    if share.size == 1:
        return PackedAttention(Spans(batch.cu_seqlens, batch.lengths), kernels)
    chunks = cut_chunks(batch.lengths, share, batch.tokens.device)
    return SharedAttention(chunks, mesh.context[share.ulysses], kernels)


def cut_chunks(lengths: Sequence[int], share: ContextShard, device: torch.device) -> tuple[Chunk, ...]:
    """The chunks of queries of one rank, for packed sequences of these lengths: two, or one that is everything."""
    ends = cumulative(lengths).tolist()
    if share.lines == 1:
        spans = Spans(carried(cumulative(lengths), device), tuple(lengths))
        return (Chunk(slice(0, ends[-1]), slice(0, ends[-1]), spans, spans),)
    size = ends[-1] // (2 * share.lines)
    found = []
    for at, chunk in enumerate(share.chunks):
        start, stop = chunk * size, (chunk + 1) * size
        inside = [(a, b) for a, b in pairwise(ends) if a < stop and b > start]
        queries = tuple(min(b, stop) - max(a, start) for a, b in inside)
        keys = tuple(min(b, stop) - a for a, b in inside)
        found.append(
            Chunk(
                slice(at * size, (at + 1) * size),
                slice(inside[0][0], stop),
                Spans(carried(cumulative(queries), device), queries),
                Spans(carried(cumulative(keys), device), keys),
            )
        )
    return tuple(found)
