"""Exceptions for users: what was given, what was expected, what to do."""

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

MAX_QUOTED = 200  # characters of a value
MAX_LINE = 2000  # characters of a line
LONG_WORD = re.compile(rf"\S{{{MAX_QUOTED + 4},}}")  # longer than a shortened one
SHOWN_RANKS = 8  # for each value, in a message
FREE_SPACE = "free some space, or choose another place"
DISK_REMEDIES: Mapping[int | None, str] = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EROFS: "choose a place that can be written",
}
OURS = str(Path(__file__).parent) + os.sep
NOT_USERS = (
    OURS,
    "<",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class UserError(ValueError):
    """The user can fix it. Exit 2, without a traceback."""


class ConfigError(UserError):
    """A recipe, override or flag."""


class LayoutError(UserError):
    """Degrees that do not fit ranks or model."""


class ModelError(UserError):
    """A model that is not supported."""


class OptionError(ModelError):
    """transformers may support it."""


class CheckpointError(UserError):
    """Missing, extra, mis-shaped or corrupt tensors."""


class DamagedError(CheckpointError):
    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class DataError(UserError):
    """Rows or batches."""


class CallbackError(UserError):
    """A `Trainer` callback raised or returned a wrong value."""


class NumericsError(UserError):
    """Training is no longer finite."""


class MachineError(RuntimeError):
    """Exit 1, without a traceback."""


def disk_problem(error: OSError, path: Path | None = None) -> str | None:
    """Returns the message for a full or read-only disk at `path`, and None for other errors."""
    remedy = DISK_REMEDIES.get(error.errno)
    if remedy is None:
        return None
    place = path or error.filename
    named = "" if place is None else f"{place}: "
    return f"{named}{error.strerror}; {remedy}"


def raise_disk_problem(error: OSError, path: Path | None = None) -> None:
    """Raises MachineError for a full or read-only disk at `path`."""
    problem = disk_problem(error, path)
    if problem is not None:
        raise MachineError(problem) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """System errors of the block that name no file get the name of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class SecondaryFailure(RuntimeError):
    """Another rank reports the cause."""


class LostStore(SecondaryFailure):
    """The ranks' store is gone."""


class Caught:
    """Ends errors of its blocks; `error` is the first."""

    def __init__(self, kind: type[BaseException] | tuple[()] = Exception) -> None:
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


def users_line(error: BaseException) -> str:
    """The last line of the traceback in a file of the user, neither in this package nor installed; "": none."""
    return _place(
        [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if not f.filename.startswith(NOT_USERS)
        ]
    )


def exit_line(error: SystemExit) -> str:
    """The line of the user that called sys.exit; "": a line of this package did, as after a signal."""
    frames = traceback.extract_tb(error.__traceback__)
    return "" if frames[-1].filename.startswith(OURS) else users_line(error) or _place(frames)


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    return f"line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


def listing(items: list[str], limit: int = 20) -> str:
    more = [f"  ... and {len(items) - limit} more"] if len(items) > limit else []
    return "\n".join([*(f"  - {item}" for item in items[:limit]), *more])


def shortened(text: object) -> str:
    return _cut(str(text), MAX_QUOTED)


def quoted(value: object) -> str:
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # huge int, deep nesting
        return f"a {type(value).__name__} that is too large to show"


def short_words(text: str) -> str:
    return LONG_WORD.sub(lambda word: shortened(word[0]), text)


def short_lines(text: str) -> str:
    return "\n".join(_cut(line, MAX_LINE) for line in text.split("\n"))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def unequal(values: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> list[str]:
    """One line per name whose values differ between ranks."""
    lines = []
    for name, by_rank in values.items():
        owners: dict[str, list[int]] = {}
        for rank, value in enumerate(by_rank):
            owners.setdefault(value, []).append(rank)
        if len(owners) > 1:
            shares = [
                f"{shortened(value)} on {_owners(ranks, hosts)}" for value, ranks in owners.items()
            ]
            lines.append(f"{name}: {'; '.join(shares[:SHOWN_RANKS])}")
    return lines


def _owners(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    lists = (list(dict.fromkeys(hosts[rank] for rank in ranks)), ranks)
    shown = [
        ", ".join(map(str, items[:SHOWN_RANKS])) + ", ..." * (len(items) > SHOWN_RANKS)
        for items in lists
    ]
    return f"{shown[0]} (rank {shown[1]})"
