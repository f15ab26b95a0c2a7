"""Grouped-query attention."""

from typing import Protocol

from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.batch.routing import Routes
from dovetail.kernels.registry import KernelSet
from dovetail.nn.linear import ColumnLinear, RowLinear
from dovetail.nn.norm import RMSNorm
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward, switch


class Context(Protocol):
    """What the layers of a forward pass share: a packed batch's, or a KV cache's."""

    @property
    def cos(self) -> Tensor: ...  # [T, rotary_dim / 2]

    @property
    def sin(self) -> Tensor: ...

    @property
    def routes(self) -> Routes: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q [T, H, C], k [T, G, C], v [T, G, Cv <= C] -> [T, H, Cv], of this rank's heads."""
        ...


class Attention(nn.Module):
    """[t, D] -> [t, D], sharded by heads."""

    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        a = spec.attention
        self.kernels = kernels
        self.layer, self.window = layer, a.windows[layer]
        parts = {"q_proj": (a.num_heads, a.head_dim)}
        parts |= dict.fromkeys(("k_proj", "v_proj"), (a.num_kv_heads, a.head_dim))
        self.qkv_proj = ColumnLinear(spec.width, parts, mesh, kernels, bias=a.qkv_bias)
        self.counts = tuple(length // a.head_dim for length in self.qkv_proj.lengths[:2])  # of this rank's q and k
        self.o_proj = RowLinear(a.num_heads * a.head_dim, spec.width, mesh, kernels, bias=a.o_bias)
        self.q_norm = RMSNorm(a.head_dim, spec.norm_eps, kernels) if a.qk_norm else None
        self.k_norm = RMSNorm(a.head_dim, spec.norm_eps, kernels) if a.qk_norm else None

    def forward_async(self, x: Tensor, context: Context) -> AsyncForward[Tensor]:
        gains, eps = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            gains, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        qkv = yield from self.qkv_proj.forward_async(x)
        yield from switch(self.qkv_proj.axis)
        q, k, v = self.kernels.heads(qkv, self.counts, context.cos, context.sin, gains, eps)
        out = context.attend(self.layer, q, k, v, self.window)
        return (yield from self.o_proj.forward_async(out.flatten(1)))
