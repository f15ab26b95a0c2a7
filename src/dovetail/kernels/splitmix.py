"""SplitMix64's finalizer (Steele, Lea, Flood 2014) over arrays of 64-bit words in int64."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", NDArray[np.int64], Tensor)

STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mixed(x: Words) -> Words:
    """Returns a hash of each word."""
    x = x ^ shifted(x, 30)
    x *= signed(FIRST)
    x = x ^ shifted(x, 27)
    x *= signed(SECOND)
    return x ^ shifted(x, 31)


def shifted(x: Words, bits: int) -> Words:
    """Returns words shifted to the right with zeros; numpy and torch would repeat the sign."""
    x = x >> bits
    x &= (1 << (64 - bits)) - 1
    return x


def signed(number: int) -> int:
    """Returns the signed 64-bit number of the same bits."""
    number &= MASK
    return number - (number >> 63 << 64)
