"""Keys and values of sequences that grow by a token a step, in pages, and the contexts of the passes that fill and read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.mesh import Mesh


class PagedCache:
    """Keys and values [P, G, page, C] of every layer, of this rank's heads, all in one tensor.

    What lies beyond a row's length is masked, not always unread, so it must be finite: zeros, or other tokens' entries.
    """

    def __init__(self, spec: ArchSpec, mesh: Mesh, dtype: torch.dtype, pages: int, page: int) -> None:
        shape = (spec.depth, 2, pages, kv_heads(spec, mesh), page, spec.attention.head_dim)
        self.page = page
        self.entries = torch.zeros(shape, dtype=dtype, device=mesh.device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.entries[layer, 0], self.entries[layer, 1]

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Whole pages, (from, to)."""
        if pages:
            source, target = torch.tensor(pages, device=self.entries.device).T
            for layer in self.entries.flatten(0, 1):
                layer[target] = layer[source]


def kv_heads(spec: ArchSpec, mesh: Mesh) -> int:
    """How many heads of keys this rank caches."""
    return max(1, spec.attention.num_kv_heads // mesh["tp"].size)


def entry_bytes(spec: ArchSpec, mesh: Mesh, dtype: torch.dtype) -> int:
    """What one token takes in all layers."""
    return 2 * spec.depth * kv_heads(spec, mesh) * spec.attention.head_dim * dtype.itemsize


@dataclass(frozen=True)
class PrefillContext:
    """Whole prompts, packed: attention as in training, and every token's entry goes to its place, pages [T] and offsets [T]."""

    cos: Tensor
    sin: Tensor
    spans: Spans
    kernels: KernelSet
    cache: PagedCache
    pages: Tensor
    offsets: Tensor
    routes: Routes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self.kernels.write_entries(*self.cache.layer(layer), self.pages, self.offsets, k, v)
        return self.kernels.attention(q, k, v, self.spans, self.spans, window)


@dataclass(frozen=True)
class DecodeContext:
    """One new token a row: its entry goes to its place, and it sees all that its row holds, or a window of it.

    lengths [B]: with the new tokens. Tokens beyond the rows are padding; they see nothing and give zeros.
    """

    cos: Tensor
    sin: Tensor
    kernels: KernelSet
    cache: PagedCache
    table: Tensor
    lengths: Tensor
    pages: Tensor
    offsets: Tensor
    routes: Routes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        n = len(self.lengths)
        held = self.cache.layer(layer)
        self.kernels.write_entries(*held, self.pages, self.offsets, k[:n], v[:n])
        out = self.kernels.decode_attention(q[:n], *held, self.table, self.lengths, window)
        out = out[..., : v.shape[-1]]
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - n)) if len(q) > n else out
