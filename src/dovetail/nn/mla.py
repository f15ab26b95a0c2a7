"""Multi-head latent attention (arXiv 2405.04434), sharded by heads; ranks of tp gather latents.

    q = q_b(norm(q_a(x))) or q_proj(x)    k_nope, v = kv_b(norm(kv_a(x)))    one rotary key for all heads

Values wider than keys: queries and keys are padded, and the scale corrected.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import KernelSet
from dovetail.nn.attention import Context
from dovetail.nn.layers import ColumnLinear, ReplicatedLinear, RMSNorm, RowLinear
from dovetail.parallel.collectives import all_gather
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward

LATENT_EPS = 1e-6  # whatever rms_norm_eps says


class LatentAttention(nn.Module):
    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        a = spec.mixers[layer]
        latent = a.latent
        assert latent is not None
        self.kernels = kernels
        self.layer = layer
        self.window = a.window
        self.head_dim = a.head_dim
        self.latent = latent
        self.tp = mesh["tp"]
        padded_scale = math.sqrt(a.head_dim / latent.key_dim)
        self.stretch = latent.stretch * padded_scale
        width = spec.width
        queries = (a.num_heads, latent.key_dim)
        if latent.q_rank is None:
            self.q_proj = ColumnLinear(width, {"q_proj": queries}, mesh, kernels)
        else:
            self.q_a_proj = ReplicatedLinear(width, latent.q_rank, kernels, bias=latent.bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, LATENT_EPS, kernels)
            self.q_b_proj = ColumnLinear(latent.q_rank, {"q_b_proj": queries}, mesh, kernels)
        kv_width = latent.kv_rank + latent.rope_dim
        self.kv_a_proj_with_mqa = ReplicatedLinear(width, kv_width, kernels, bias=latent.bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, LATENT_EPS, kernels)
        kv_heads = (a.num_heads, latent.nope_dim + latent.v_dim)
        self.kv_b_proj = ColumnLinear(latent.kv_rank, {"kv_b_proj": kv_heads}, mesh, kernels)
        out_width = a.num_heads * latent.v_dim
        self.o_proj = RowLinear(out_width, width, mesh, kernels, bias=a.o_bias)

    def forward_async(self, x: Tensor, context: Context) -> AsyncForward[Tensor]:
        latent = self.latent
        queries = yield from self._queries(x)
        nope = latent.nope_dim
        q_nope, q_rope = queries.split((nope, latent.rope_dim), dim=-1)
        kv_latent = self.kv_a_proj_with_mqa(x)
        kv, k_rope = kv_latent.split((latent.kv_rank, latent.rope_dim), dim=-1)
        kv = self.kv_a_layernorm(kv)
        expanded = yield from self.kv_b_proj.forward_async(kv)
        heads = expanded.unflatten(-1, (-1, nope + latent.v_dim))
        k_nope, v = heads.split((nope, latent.v_dim), dim=-1)
        k_rope = all_gather(k_rope, self.tp)
        k_rope = self._rotate(k_rope[:, None], context)
        num_heads = k_nope.shape[1]
        k_rope = k_rope.expand(-1, num_heads, -1)  # one rotary key for all heads
        q_rope = self._rotate(q_rope, context)
        q = torch.cat((q_nope, q_rope), dim=-1)
        q = q * self.stretch
        k = torch.cat((k_nope, k_rope), dim=-1)
        padding = self.head_dim - latent.key_dim
        if padding:
            q = F.pad(q, (0, padding))
            k = F.pad(k, (0, padding))
        out = context.attend(self.layer, q, k, v, self.window)
        joined = out.flatten(1)
        return (yield from self.o_proj.forward_async(joined))

    def _queries(self, x: Tensor) -> AsyncForward[Tensor]:
        if self.latent.q_rank is None:
            q = yield from self.q_proj.forward_async(x)
        else:
            down = self.q_a_proj(x)
            normed = self.q_a_layernorm(down)
            q = yield from self.q_b_proj.forward_async(normed)
        return q.unflatten(-1, (-1, self.latent.key_dim))

    def _rotate(self, x: Tensor, context: Context) -> Tensor:
        """Heads [T, H, R]; interleaved channels are reordered into halves."""
        if self.latent.interleaved:
            first = x[..., 0::2]
            second = x[..., 1::2]
            x = torch.cat((first, second), dim=-1)
        return self.kernels.rope(x, context.cos, context.sin)
