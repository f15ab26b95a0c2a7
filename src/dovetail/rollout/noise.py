"""The sampler's noise: one uniform number a token, a function of what the token is and of nothing else.

A counter-based generator has no state, so no rank, batch or order can change what it gives. Each key is folded in by
one round of SplitMix64 (Steele, Lea, Flood 2014), whose finalizer is a bijection: two tokens whose keys differ in one
place never share their 64 bits.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MASK = (1 << 64) - 1


def uniforms(
    seed: int, step: int, rows: NDArray[np.int64], samples: NDArray[np.int64], position: int
) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each pair of `rows` [n] and `samples` [n]: multiples of 2^-53."""
    state = np.zeros(rows.shape, np.uint64)
    for key in (_word(seed), _word(step), rows.astype(np.uint64), samples.astype(np.uint64), _word(position)):
        state = _mixed((state ^ key) + _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _word(value: int) -> np.uint64:
    return np.uint64(value & _MASK)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer; products wrap around, as they are meant to."""
    x = (x ^ (x >> np.uint64(30))) * _FACTORS[0]
    x = (x ^ (x >> np.uint64(27))) * _FACTORS[1]
    return x ^ (x >> np.uint64(31))
