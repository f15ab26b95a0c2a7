"""Keys and values of sequences that grow by a token a step, and the contexts of the passes that fill and read them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.reference import Spans, as_wide_as
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Mesh
from dovetail.routing import Routes


class KVCache:
    """Keys and values [B, G, N, C] of every layer, of this rank's heads. Row b holds `lengths[b]` tokens.

    `longest`: an upper bound of the lengths, known to the host. What lies beyond a row's length is masked, not unread,
    so it must be finite: zeros, or other tokens' entries.
    """

    def __init__(self, spec: ArchSpec, mesh: Mesh, dtype: torch.dtype, lengths: list[int], capacity: int) -> None:
        heads = max(1, spec.attention.num_kv_heads // mesh["tp"].size)
        shape = (len(lengths), heads, capacity, spec.attention.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=mesh.device) for _ in range(spec.depth)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.lengths = torch.tensor(lengths, device=mesh.device)
        self.longest = max(lengths)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these; one layer is held twice at a time."""
        for held in (self.keys, self.values):
            for layer, x in enumerate(held):
                held[layer] = x[rows]
        self.lengths = self.lengths[rows]

    def grow(self) -> None:
        """Count the token that every row just got."""
        self.lengths = self.lengths + 1
        self.longest += 1


@dataclass(frozen=True)
class PrefillContext:
    """Whole prompts, packed: attention as in training, and every row of the cache gets its prompt's entries.

    source [B, longest]: where in the packed tokens each entry of the cache lies.
    """

    cos: Tensor
    sin: Tensor
    spans: Spans
    kernels: KernelSet
    cache: KVCache
    source: Tensor
    routes: Routes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        for held, new in ((self.cache.keys[layer], k), (self.cache.values[layer], as_wide_as(k, v))):
            held[:, :, : self.cache.longest] = new[self.source].transpose(1, 2)
        return self.kernels.attention(q, k, v, self.spans, self.spans, window)


@dataclass(frozen=True)
class DecodeContext:
    """One new token a row: its entries join the cache, and it sees all that its row holds, or a window of it.

    Tokens beyond the rows are padding; they see nothing and give zeros.
    """

    cos: Tensor
    sin: Tensor
    kernels: KernelSet
    cache: KVCache
    rows: Tensor  # 0 .. B - 1
    routes: Routes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        n, lengths, longest = len(self.rows), self.cache.lengths, self.cache.longest + 1
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, lengths] = k[:n]
        values[self.rows, :, lengths] = as_wide_as(k, v)[:n]
        out = self.kernels.decode_attention(q[:n], keys[:, :, :longest], values[:, :, :longest], lengths + 1, window)
        out = out[..., : v.shape[-1]]
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - n)) if len(q) > n else out
