"""Exceptions for users: what was given, what was expected and what to do.

The command line prints a `UserError` once, without a traceback, and exits with 2; any other is a defect and exits with 1.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

MAX_QUOTED = 200  # characters of a given value in a message
MAX_LINE = 2000  # characters of a line of a report
LONG_WORD = re.compile(rf"\S{{{MAX_QUOTED + 4},}}")  # longer than a shortened one
SHOWN_RANKS = 8  # for each value, in a message


class UserError(ValueError):
    """A mistake that the user can fix."""


class ConfigError(UserError):
    """A recipe, an override or a flag that cannot be followed."""


class LayoutError(UserError):
    """Parallel degrees that do not fit the ranks or the model."""


class ModelError(UserError):
    """A model that this engine does not compute."""


class OptionError(ModelError):
    """An option that the native engine does not compute; transformers may."""


class CheckpointError(UserError):
    """Tensors that are missing, extra, of a wrong shape or corrupt."""


class DamagedError(CheckpointError):
    """The checkpoint at `path` is not as it was written."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class DataError(UserError):
    """Rows or batches that cannot be trained on or scored."""


class CallbackError(UserError):
    """A callback of a `Trainer` raised, on any rank, or returned what it may not."""


class NumericsError(UserError):
    """Numbers of training are no longer finite."""


class MachineError(RuntimeError):
    """A defect of the machine. Exit 1, without a traceback."""


class SecondaryFailure(RuntimeError):
    """Another rank failed first and reports the cause."""


class LostStore(SecondaryFailure):
    """The store of the ranks is gone."""


class Caught:
    """Ends the errors of its `with` blocks; `error` is the first."""

    def __init__(self, kind: type[BaseException] = Exception) -> None:
        self.kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        caught = isinstance(error, self.kind)
        self.error = self.error or (error if caught else None)
        return caught


def one_line(error: BaseException | None) -> str:
    return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())


def listing(items: list[str], limit: int = 20) -> str:
    more = [f"  ... and {len(items) - limit} more"] if len(items) > limit else []
    return "\n".join([*(f"  - {item}" for item in items[:limit]), *more])


def shortened(text: object) -> str:
    return _cut(str(text), MAX_QUOTED)


def quoted(value: object) -> str:
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # an int of thousands of digits; lists nested too deep
        return f"a {type(value).__name__} that is too large to show"


def short_words(text: str) -> str:
    """Libraries may repeat a whole value."""
    return LONG_WORD.sub(lambda word: shortened(word[0]), text)


def short_lines(text: str) -> str:
    return "\n".join(_cut(line, MAX_LINE) for line in text.split("\n"))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def unequal(values: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> list[str]:
    """A line for each name whose values, one a rank, differ."""
    lines = []
    for name, by_rank in values.items():
        owners: dict[str, list[int]] = {}
        for rank, value in enumerate(by_rank):
            owners.setdefault(value, []).append(rank)
        if len(owners) > 1:
            shares = [f"{shortened(value)} on {_owners(ranks, hosts)}" for value, ranks in owners.items()]
            lines.append(f"{name}: {'; '.join(shares[:SHOWN_RANKS])}")
    return lines


def _owners(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    lists = (list(dict.fromkeys(hosts[rank] for rank in ranks)), ranks)
    shown = [", ".join(map(str, items[:SHOWN_RANKS])) + ", ..." * (len(items) > SHOWN_RANKS) for items in lists]
    return f"{shown[0]} (rank {shown[1]})"
