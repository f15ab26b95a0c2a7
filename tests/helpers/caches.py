"""What a sampler's cache holds."""

from itertools import chain

import torch
from torch import Tensor

from dovetail.sampler.kv_cache import PagedCache


def held(cache: PagedCache) -> Tensor:
    """Keys and values of all layers, which are alike, without the page that takes the writes of padding."""
    return torch.stack(list(chain.from_iterable(cache.layers)))[:, 1:]


def fill(cache: PagedCache, value: float) -> None:
    """Write a number wherever the cache has room."""
    for entries in chain.from_iterable(cache.layers):
        entries.fill_(value)
