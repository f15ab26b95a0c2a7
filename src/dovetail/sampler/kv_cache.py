"""The paged KV cache: entries, pages, and attention in prefill and decode."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.mesh import Mesh


def numbers_per_token(spec: ArchSpec, mesh: Mesh) -> int:
    """Returns how many numbers this rank keeps of a token: the keys and values of all layers."""
    heads = [mixer.cached_heads(mesh["tp"].size) for mixer in spec.mixers]
    return sum(2 * count * channels for count, channels in heads)


class PagedCache:
    """Pages of each layer's keys and values [2, pages, heads, page_size, C], as its mixer asks.

    Entries beyond a length are masked, not always unread, so they must be finite.
    """

    def __init__(
        self, spec: ArchSpec, mesh: Mesh, dtype: torch.dtype, pages: int, page_size: int
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = mesh.device
        self.layers: list[tuple[Tensor, Tensor]] = []
        for mixer in spec.mixers:
            heads, channels = mixer.cached_heads(mesh["tp"].size)
            shape = (2, pages, heads, page_size, channels)
            keys, values = torch.zeros(shape, dtype=dtype, device=mesh.device)
            self.layers.append((keys, values))

    def copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copies each pair's first page over its second, in every layer."""
        if not pages:
            return
        source, target = torch.tensor(pages, device=self.device).T
        for entries in chain.from_iterable(self.layers):
            entries[target] = entries[source]


class PagePool:
    """Pages 1 to `count`, reference-counted. Page 0 takes the writes of padding."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._references = [0] * (count + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        assert n <= self.num_free, f"{n} pages wanted, {self.num_free} free"
        pages = [self._free.pop() for _ in range(n)]
        self.share(pages)
        return pages

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def free(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was freed twice"
            if not self._references[page]:
                self._free.append(page)


@dataclass(frozen=True)
class PageBudget:
    """Pages of `samples` completions of `new_tokens` tokens, by the length of their prompt."""

    samples: int
    new_tokens: int
    page_size: int

    def pages_for_prompt(self, length: int) -> int:
        return -(-length // self.page_size)

    def pages_for_sample(self, length: int) -> int:
        """Returns the pages of a prompt and its completion, whose last token gets no entry."""
        entries = length + max(0, self.new_tokens - 1)
        return -(-entries // self.page_size)

    def pages_beyond_prompt(self, length: int, *, last: bool) -> int:
        """Returns the pages that a sample needs for itself.

        The last sample takes over the prompt's partly filled page; others copy it.
        """
        shared = self.pages_for_prompt(length) if last else length // self.page_size
        return self.pages_for_sample(length) - shared

    def pages_for_first(self, length: int) -> int:
        beyond = self.pages_beyond_prompt(length, last=self.samples == 1)
        return self.pages_for_prompt(length) + beyond

    def pages_for_all(self, length: int) -> int:
        beyond = self.pages_beyond_prompt(length, last=False)
        return self.pages_for_sample(length) + (self.samples - 1) * beyond


@dataclass(frozen=True)
class _CacheContext:
    """What attention needs of the cache: new tokens' entries go to `pages` [T] at `offsets` [T]."""

    cos: Tensor
    sin: Tensor
    kernels: KernelSet
    cache: PagedCache
    pages: Tensor
    offsets: Tensor
    routes: Routes


@dataclass(frozen=True)
class PrefillContext(_CacheContext):
    """The context of whole prompts, packed."""

    spans: Spans

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self.kernels.write_entries(*self.cache.layers[layer], self.pages, self.offsets, k, v)
        return self.kernels.attention(q, k, v, self.spans, self.spans, window)


@dataclass(frozen=True)
class DecodeContext(_CacheContext):
    """The context of one new token a sequence, counted in lengths [B].

    Tokens beyond B are padding and give zeros.
    """

    page_table: Tensor
    lengths: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        n = len(self.lengths)
        entries = self.cache.layers[layer]
        self.kernels.write_entries(*entries, self.pages, self.offsets, k[:n], v[:n])
        out = self.kernels.decode_attention(q[:n], *entries, self.page_table, self.lengths, window)
        out = out[..., : v.shape[-1]]
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - n)) if len(q) > n else out
