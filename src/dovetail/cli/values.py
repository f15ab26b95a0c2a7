"""Argument types."""

import argparse
import math
from collections.abc import Callable
from itertools import pairwise

from dovetail.errors import shortened


def number(kind: type[int] | type[float], *, positive: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not finite")
        if value < 0 or (positive and value == 0):
            raise argparse.ArgumentTypeError(f"{shortened(text)} is {'not more' if positive else 'less'} than 0")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # for argparse's messages
    return read


def share(text: str) -> float:
    value = number(float, positive=True)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is more than 1")
    return value


def words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    return tuple(int(number(int)(word)) for word in text.split(","))


def decode_speeds(text: str) -> tuple[tuple[int, float], ...]:
    """ "1:205,64:12850": running samples, tokens/s of all together."""
    pairs = [part.partition(":")[::2] for part in text.split(",")]
    points = [(int(COUNT(count)), RATE(speed)) for count, speed in pairs]
    if any(a[0] >= b[0] or a[1] / a[0] < b[1] / b[0] for a, b in pairwise(points)):
        expected = "rising numbers of samples, each of which gets no more tokens than among fewer"
        raise argparse.ArgumentTypeError(f"{shortened(text)}: expected {expected}")
    return tuple(points)


COUNT, SECONDS, RATE = number(int, positive=True), number(float, positive=True), number(float, positive=True)
