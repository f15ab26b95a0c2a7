"""The sampler's noise: one uniform number a token, a function of what the token is and of nothing else.

A counter-based generator has no state, so no rank, batch or order can change what it gives. Each key is folded in by
one round of SplitMix64 (Steele, Lea, Flood 2014), whose finalizer is a bijection: two tokens whose keys differ in one
place never share their 64 bits. The position comes last: what the other keys give is a row's stream, and a device draws
from it without asking the host. NumPy and torch compute the same bits: signed integers that wrap around.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", NDArray[np.int64], Tensor)
_MASK = (1 << 64) - 1


def uniforms(
    seed: int, step: int, rows: NDArray[np.int64], samples: NDArray[np.int64], position: int
) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each pair of `rows` [n] and `samples` [n]: multiples of 2^-53."""
    found = streams(seed, step, rows, samples)
    return bits_at(found, np.full_like(found, _signed(position))).astype(np.float64) * 2.0**-53


def streams(seed: int, step: int, rows: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """What all keys but the position give, for each pair of `rows` [n] and `samples` [n]."""
    state = np.zeros(rows.shape, np.int64)
    for key in (_signed(seed), _signed(step), rows.astype(np.int64), samples.astype(np.int64)):
        state = _mixed((state ^ key) + _GAMMA)
    return state


def bits_at(streams: Words, positions: Words) -> Words:
    """The 53 bits of each stream [n] at its position [n], as an integer: the number times 2^53."""
    return _shifted(_mixed((streams ^ positions) + _GAMMA), 11)


def _mixed(x: Words) -> Words:
    """SplitMix64's finalizer; products wrap around, as they are meant to."""
    x = (x ^ _shifted(x, 30)) * _FACTORS[0]
    x = (x ^ _shifted(x, 27)) * _FACTORS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Words, by: int) -> Words:
    """To the right, zeros coming in: a signed shift would repeat the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The 64 lowest bits of a number, as a signed one."""
    value &= _MASK
    return value - (value >> 63 << 64)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
