"""Grouped-query attention over packed tokens. What the queries see is given from outside: a packed batch, or a cache."""

from typing import Protocol

from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.batch.routing import Routes
from dovetail.kernels.registry import KernelSet
from dovetail.nn.beside import DelayedWgrad
from dovetail.nn.linear import ColumnLinear, RowLinear
from dovetail.nn.norm import RMSNorm
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward, switch


class Context(Protocol):
    """What one forward pass knows about its tokens, the same for every layer: rotary tables, what attends to
    what, and which experts tokens go to."""

    @property
    def cos(self) -> Tensor: ...  # [T, rotary_dim / 2]

    @property
    def sin(self) -> Tensor: ...

    @property
    def routes(self) -> Routes: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, beside: DelayedWgrad) -> Tensor:
        """q [T, H, C], k [T, G, C], v [T, G, Cv <= C] -> [T, H, Cv], of this rank's heads.

        beside: what collectives of its backward pass may have beside them, if it has some.
        """
        ...


class Attention(nn.Module):
    """[t, D] -> [t, D]. Queries, keys and values are one product, cut by heads."""

    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        a = spec.attention
        self.kernels = kernels
        self.layer, self.window = layer, a.windows[layer]
        parts = {"q_proj": (a.num_heads, a.head_dim)}
        parts |= dict.fromkeys(("k_proj", "v_proj"), (a.num_kv_heads, a.head_dim))
        self.qkv_proj = ColumnLinear(spec.width, parts, mesh, bias=a.qkv_bias)
        self.counts = tuple(length // a.head_dim for length in self.qkv_proj.lengths[:2])  # of this rank's q and k
        self.o_proj = RowLinear(a.num_heads * a.head_dim, spec.width, mesh, bias=a.o_bias)
        self.q_norm = RMSNorm(a.head_dim, spec.norm_eps, kernels) if a.qk_norm else None
        self.k_norm = RMSNorm(a.head_dim, spec.norm_eps, kernels) if a.qk_norm else None

    def turns(self, x: Tensor, context: Context, beside: DelayedWgrad) -> AsyncForward[Tensor]:
        """[t, D] -> [t, D], as a generator; the output's weight gradient may be computed beside a collective."""
        gains, eps = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            gains, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        joint = yield from self.qkv_proj.turns(x)
        yield from switch(self.qkv_proj.axis)
        q, k, v = self.kernels.heads(joint, self.counts, context.cos, context.sin, gains, eps)
        mixed = context.attend(self.layer, q, k, v, self.window, beside)
        return (yield from self.o_proj.turns(mixed.flatten(1), beside))
