"""Checksums of weights (docs/adr/026-sums-of-weights.md).

Bytes are padded with zeros to 64-bit words w_0, w_1, ... (little-endian); mix is the finalizer of SplitMix64:

    num_bytes + sum over i of mix(w_i xor (i * STEP))    modulo 2^64
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from dovetail.kernels.splitmix import MASK, STEP, mixed, signed

WORD = 8  # bytes
CHUNK = 1 << 16  # words that a CPU's cache holds
TOTALS = 256  # allocated together


def checksums_of(tensors: Iterable[Tensor]) -> list[str]:
    """Returns 16 hexadecimal digits for each tensor. Waits for the device once."""
    checksums = Checksums()
    for tensor in tensors:
        checksums.add(tensor)
    return checksums.hexadecimal()


class Checksums:
    """Checksums of tensors on one device. `add` does not wait for it."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._totals: list[Tensor] = []  # int64
        self._fresh: Iterator[Tensor] = iter(())

    def add(self, tensor: Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.data_ptr() % WORD or data.storage_offset() % WORD:
            data = data.clone()
        total = next(self._fresh, None)
        if total is None:  # one launch for many zeros
            total, *others = torch.zeros(TOTALS, dtype=torch.int64, device=data.device).unbind()
            self._fresh = iter(others)
        whole = len(data) // WORD * WORD
        add = _adder(data.device)
        if whole:
            add(data[:whole].view(torch.int64), total, 0)
        if whole < len(data):
            last = data.new_zeros(WORD)
            last[: len(data) - whole] = data[whole:]
            add(last.view(torch.int64), total, whole // WORD)
        self._sizes.append(len(data))
        self._totals.append(total)

    def hexadecimal(self) -> list[str]:
        totals = torch.stack(self._totals).tolist() if self._totals else []
        return [
            f"{(total + size) & MASK:016x}" for total, size in zip(totals, self._sizes, strict=True)
        ]


def add_words(words: Tensor, total: Tensor, first: int) -> None:
    """Adds mixed words [n] int64 from number `first` on to `total`. Their definition."""
    for start in range(0, len(words), CHUNK):
        x = words[start : start + CHUNK]
        place = torch.arange(
            first + start, first + start + len(x), dtype=torch.int64, device=words.device
        )
        total += mixed(x ^ place.mul_(signed(STEP))).sum()


def _adder(device: torch.device) -> Callable[[Tensor, Tensor, int], None]:
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return importlib.import_module("dovetail.kernels.checksums_triton").add_words
    return add_words
