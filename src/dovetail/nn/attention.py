"""Grouped-query attention, and the context of a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from dovetail.arch.spec import BY_LENGTH, ArchSpec, RopeSpec
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import to_device
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans, wide
from dovetail.kernels.registry import KernelSet
from dovetail.nn.context_parallel import SharedAttention, cut_chunks
from dovetail.nn.layers import ColumnLinear, RMSNorm, RowLinear
from dovetail.nn.rope import inverse_frequencies
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward, switch


class Context(Protocol):
    """What layers share: of a packed batch, or a KV cache."""

    @property
    def cos(self) -> Tensor: ...  # [T, rotary_dim / 2]

    @property
    def sin(self) -> Tensor: ...

    @property
    def routes(self) -> Routes: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q [T, H, C], k [T, G, C], v [T, G, Cv <= C] -> [T, H, Cv]."""
        ...


@dataclass(frozen=True)
class PackedAttention:
    spans: Spans
    kernels: KernelSet

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        return self.kernels.attention(q, k, v, self.spans, self.spans, window)


BatchAttention = PackedAttention | SharedAttention


@dataclass(frozen=True)
class BatchContext:
    cos: Tensor
    sin: Tensor
    attention: BatchAttention
    routes: Routes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        return self.attention.attend(q, k, v, window)


def context_of(
    micro: MicroBatch, rope: RopeSpec, dtype: torch.dtype, mesh: Mesh, kernels: KernelSet
) -> BatchContext:
    batch = micro.batch
    own = None if micro.is_whole else micro.order
    cos, sin = rope_tables(rope, batch.positions, batch.lengths, dtype, own)
    attention = attention_of(micro, mesh, kernels)
    routes = micro.routes or Routes()
    return BatchContext(cos, sin, attention, routes)


def attention_of(micro: MicroBatch, mesh: Mesh, kernels: KernelSet) -> BatchAttention:
    batch = micro.batch
    share = micro.shard
    if micro.is_whole:
        return PackedAttention(Spans(batch.cu_seqlens, batch.lengths), kernels)
    chunks = cut_chunks(batch.lengths, share, batch.tokens.device)
    return SharedAttention(chunks, mesh.context[share.ulysses], kernels)


def rope_tables(
    spec: RopeSpec,
    positions: Tensor,
    lengths: Sequence[int],
    dtype: torch.dtype,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [T, R / 2] of positions [T], or [3, T] where the spec has `rows`.

    lengths: of sequences, for kinds `BY_LENGTH`. at [t]: these tokens only.
    """
    if at is not None:
        positions = positions[..., at]
    frequencies = _frequencies_on(spec, wide(dtype), positions.device)
    if spec.kind in BY_LENGTH and max(lengths, default=0) > spec.max_positions:
        by_length = [inverse_frequencies(spec, wide(dtype), length) for length in lengths]
        rows = torch.stack(by_length)
        by_token = rows.repeat_interleave(torch.tensor(lengths), dim=0)
        frequencies = to_device(by_token, positions.device)
        if at is not None:
            frequencies = frequencies[at]
    turns = positions.to(wide(dtype))
    turns = turns[_rows_on(spec, positions.device)].T if spec.rows else turns[:, None]
    angles = turns * frequencies
    cos = angles.cos() * spec.attention_factor
    sin = angles.sin() * spec.attention_factor
    return cos.to(dtype), sin.to(dtype)


@lru_cache(maxsize=64)
def _frequencies_on(spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached: sending waits for the device."""
    return to_device(inverse_frequencies(spec, dtype), device)


@lru_cache(maxsize=64)
def _rows_on(spec: RopeSpec, device: torch.device) -> Tensor:
    return to_device(torch.tensor(spec.rows), device)


class Attention(nn.Module):
    """[t, D] -> [t, D], sharded by heads."""

    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        a = spec.mixers[layer]
        self.kernels = kernels
        self.layer = layer
        self.window = a.window
        queries = (a.num_heads, a.head_dim)
        keys = (a.num_kv_heads, a.head_dim)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = ColumnLinear(spec.width, parts, mesh, kernels, bias=a.qkv_bias)
        q_length, k_length, _ = self.qkv_proj.lengths
        self.counts = (q_length // a.head_dim, k_length // a.head_dim)
        out_width = a.num_heads * a.head_dim
        self.o_proj = RowLinear(out_width, spec.width, mesh, kernels, bias=a.o_bias)
        self.q_norm = RMSNorm(a.head_dim, spec.norm_eps, kernels) if a.qk_norm else None
        self.k_norm = RMSNorm(a.head_dim, spec.norm_eps, kernels) if a.qk_norm else None

    def forward_async(self, x: Tensor, context: Context) -> AsyncForward[Tensor]:
        gains = None
        eps = 0.0
        if self.q_norm is not None and self.k_norm is not None:
            gains = (self.q_norm.weight, self.k_norm.weight)
            eps = self.q_norm.eps
        qkv = yield from self.qkv_proj.forward_async(x)
        yield from switch(self.qkv_proj.axis)
        q, k, v = self.kernels.heads(qkv, self.counts, context.cos, context.sin, gains, eps)
        out = context.attend(self.layer, q, k, v, self.window)
        joined = out.flatten(1)
        return (yield from self.o_proj.forward_async(joined))
