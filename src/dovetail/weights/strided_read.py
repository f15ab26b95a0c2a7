"""A rectangle of a tensor in a file: the stretches that it is made of, and how to read many of them at once.

Columns of a matrix are thousands of short stretches. One call of the kernel brings hundreds of them to where they belong,
one behind the other; what lies between two goes into the same few bytes of the processor's cache again and again, so it
takes no memory and no time of the interpreter.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from errno import EINTR
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.parallel.placement import Slices

NEAR = 1 << 12  # bytes between two stretches up to which it is faster to read them, too, than to ask for each by itself
GAP = 1 << 16  # the same where each by itself is a call of the kernel
MOST = 1 << 15  # stretches of one rectangle, so that the list of them stays small
PLACES = 1024  # that one call can fill: Linux's UIO_MAXIOV
ADDRESS, LENGTH = 0, 1  # columns of the kernel's `iovec`

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)


class ByteRanges(NamedTuple):
    """The contiguous stretches of a rectangle, in its row-major order: where each begins [n], in bytes, and their length."""

    offsets: NDArray[np.int64]
    length: int

    @property
    def gap(self) -> int:
        """The fewest bytes between two of them; 0 where there is but one."""
        return int(np.diff(self.offsets).min()) - self.length if len(self.offsets) > 1 else 0


def run_length(shape: Sequence[int], slices: Slices) -> int:
    """Elements of each stretch of a rectangle of a row-major tensor: the dims behind the last one that is cut are whole."""
    length = 1
    for (start, stop), size in zip(reversed(slices), reversed(shape), strict=True):
        length *= stop - start
        if stop - start != size:
            break
    return length


def runs_of(shape: Sequence[int], slices: Slices, itemsize: int) -> ByteRanges:
    """The stretches of a rectangle of a row-major tensor; none where it is empty."""
    if any(start == stop for start, stop in slices):
        return ByteRanges(np.empty(0, np.int64), 0)
    strides = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, (start, stop) in enumerate(slices) if stop - start != shape[dim]]
    last = cut[-1] if cut else 0
    offsets = np.array([slices[last][0] * strides[last] if cut else 0])
    for (start, stop), stride in zip(slices[:last], strides, strict=False):
        offsets = (offsets[:, None] + np.arange(start, stop) * stride).reshape(-1)
    return ByteRanges(offsets, run_length(shape, slices) * itemsize)


def joined_runs(runs: ByteRanges) -> Iterator[ByteRanges]:
    """Parts of `runs` that are worth reading as one: between their stretches lie at most `GAP` bytes."""
    if not runs.length:
        return
    apart = np.flatnonzero(np.diff(runs.offsets) - runs.length > GAP) + 1
    for start, stop in zip([0, *apart], [*apart, len(runs.offsets)], strict=True):
        yield ByteRanges(runs.offsets[start:stop], runs.length)


def read_runs(fd: int, base: int, runs: ByteRanges, address: int) -> int:
    """Read stretches that lie at `base` + their offsets of a file to `address` and behind, without what is between them.

    The result is 0, or the byte behind the last one that was asked for where the file ends before it.
    """
    gaps = np.diff(runs.offsets) - runs.length
    aside = ctypes.create_string_buffer(int(gaps.max(initial=0)))
    places = np.empty((2 * len(runs.offsets) - 1, 2), np.int64)
    places[::2, ADDRESS] = address + np.arange(len(runs.offsets)) * runs.length
    places[::2, LENGTH] = runs.length
    places[1::2, ADDRESS] = ctypes.addressof(aside)
    places[1::2, LENGTH] = gaps
    at, end = base + int(runs.offsets[0]), base + int(runs.offsets[-1]) + runs.length
    while at < end:
        now = places[:PLACES]
        got = _preadv(fd, now.ctypes.data, len(now), at)
        if got < 0 and ctypes.get_errno() != EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if got == 0:
            return end
        at += max(got, 0)
        places = _behind(places, now, max(got, 0))
    return 0


def _behind(places: NDArray[np.int64], now: NDArray[np.int64], got: int) -> NDArray[np.int64]:
    """What is left of `places` when so many bytes of its first ones, `now`, are there."""
    ends = np.cumsum(now[:, LENGTH])
    full = int(np.searchsorted(ends, got, side="right"))
    inside = got - int(ends[full - 1]) if full else got
    left = places[full:]
    if inside:
        left[0] += (inside, -inside)
    return left
