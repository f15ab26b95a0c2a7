"""What the tokens of one micro-batch attend to when a whole batch is computed: alone, or cut over the cp axis.

Under context parallelism a layer's queries, keys and values come as this rank's tokens [t, heads, C]:

    ulysses   all_to_all: some tokens of all heads -> all the group's tokens of some heads; its inverse for the output
    gather    all_gather of keys and values over the lines; queries stay
    product   both, in this order; each mode is the product with the other axis of size 1

A line's queries are two chunks of the batch. A chunk's keys are one contiguous stretch, from the start of the sequence
that its first token belongs to up to its own end, so each is one call of packed, bottom-right causal attention.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.arch.spec import RopeSpec
from dovetail.batch import carried, cumulative
from dovetail.comm import heads_to_tokens, nothing, tokens_to_heads
from dovetail.kernels.reference import Spans, as_wide_as
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import ContextAxes, Mesh
from dovetail.micro import MicroBatch, Share
from dovetail.nn.beside import Beside
from dovetail.nn.rope import rope_tables
from dovetail.nn.sharing import share_keys
from dovetail.routing import Routes


@dataclass(frozen=True)
class PackedAttention:
    """Every token attends to its own sequence, up to itself; all tokens are here."""

    spans: Spans
    kernels: KernelSet

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, _beside: Beside) -> Tensor:
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, beside: Beside) -> Tensor:
        """q [t, H, C], k [t, G, C], v [t, G, Cv] -> [t, H, Cv]. Keys and values travel as one.

        Of what the backward pass has beside its exchanges, the first takes one, and the last all that is left.
        """
        beside.awaited = k.requires_grad
        narrow, v = v.shape[-1], as_wide_as(k, v)
        q, k, v = self._all_tokens(q, k, v, beside)
        rows: Sequence[Tensor] = (q,)
        seen: Iterable[tuple[Tensor, Tensor]] = ((k, v),)
        if self.axes.gather.size > 1:
            rows = q.split([chunk.queries.stop - chunk.queries.start for chunk in self.chunks])
            keys = [chunk.keys for chunk in self.chunks]
            # where heads are exchanged too, theirs is the last exchange of the backward pass, and a larger one
            during = beside.rest if self.axes.ulysses.size == 1 else nothing
            seen = share_keys(k, v, keys, self.axes.gather, self.kernels.sum_in_order, during)
        out = [
            self.kernels.attention(queries, *found, chunk.q_spans, chunk.k_spans, window)
            for queries, found, chunk in zip(rows, seen, self.chunks, strict=True)
        ]
        return heads_to_tokens(out[0] if len(out) == 1 else torch.cat(out), self.axes.ulysses, beside.one)[..., :narrow]

    def _all_tokens(self, q: Tensor, k: Tensor, v: Tensor, beside: Beside) -> tuple[Tensor, ...]:
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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, beside: Beside) -> Tensor:
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


def cut_chunks(lengths: Sequence[int], share: Share, device: torch.device) -> tuple[Chunk, ...]:
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
