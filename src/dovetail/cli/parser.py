"""The parser of command lines, which reports all mistakes at once, and the kinds of values."""

import argparse
import difflib
import math
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

from dovetail.errors import ConfigError, listing, short_words, shortened
from dovetail.launch.process import put


def number(kind: type[int] | type[float], *, positive: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentTypeError(f"{shortened(text)} is not finite")
        if value < 0 or (positive and value == 0):
            raise ArgumentTypeError(
                f"{shortened(text)} is {'not more' if positive else 'less'} than 0"
            )
        return value

    read.__name__ = "whole number" if kind is int else "number"  # for argparse's messages
    return read


def share(text: str) -> float:
    value = number(float, positive=True)(text)
    if value > 1:
        raise ArgumentTypeError(f"{shortened(text)} is more than 1")
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
        raise ArgumentTypeError(f"{shortened(text)}: expected {expected}")
    return tuple(points)


COUNT = number(int, positive=True)
SECONDS = number(float, positive=True)
RATE = number(float, positive=True)


class Parser(ArgumentParser):
    """Reports all mistakes at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Formatter)
        self.mistakes: list[str] = []

    def _get_values(self, action: Action, strings: list[str]) -> Any:
        try:
            return super()._get_values(action, strings)
        except ArgumentError as error:
            near = difflib.get_close_matches(str(strings[0]), map(str, action.choices or ()), n=1)
            self.mistakes.append(
                short_words(str(error)) + "".join(f"; did you mean {word}?" for word in near)
            )
            return None

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        parsed = super().parse_known_args(*given, **named)
        if self.mistakes:
            self.error("")
        return parsed

    def error(self, message: str) -> NoReturn:
        lines = [*self.mistakes, *([short_words(message)] if message else [])]
        text = f"{lines[0]}; " if len(lines) == 1 else f"{len(lines)} mistakes:\n{listing(lines)}\n"
        raise ConfigError(f"{text}see {self.prog} --help")

    def print_help(self, file: object = None) -> None:
        put(self.format_help())


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        default = action.default
        hidden = default is None or default is False or default in (argparse.SUPPRESS, [])
        shown = not hidden and "default" not in text
        return f"{text}; default: {default}".lstrip("; ") if shown else text
