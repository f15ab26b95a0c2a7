"""The mistakes a user can make, as exception kinds: each message says what was given, what was expected and what to do.

Everything raised on purpose for a user's mistake is a `UserError`; the command line prints its message once, without
a traceback, and exits with 2. Anything else that escapes is a defect of ours and exits with 1.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

REPEATED = 200  # characters of what was given that a message repeats
LINE = 2000  # characters of a line of a report
WORD = re.compile(rf"\S{{{REPEATED + 4},}}")  # one that is shortened already is not shortened again
SHOWN_RANKS = 8  # of those that have a value, in a message


class UserError(ValueError):
    """A mistake that the user can mend; the message names the edit."""


class ConfigError(UserError):
    """A recipe, an override or a flag says something that cannot be done."""


class LayoutError(UserError):
    """Parallel degrees that do not fit the ranks or the model."""


class ModelError(UserError):
    """A model directory asks for something that this engine does not compute."""


class OptionError(ModelError):
    """An option of a known family that the native engine does not compute; transformers' own layers may."""


class CheckpointError(UserError):
    """Tensors that are missing, extra, mis-shaped or corrupt, all named together."""


class DamagedError(CheckpointError):
    """Bytes of the checkpoint at `path` that are not those that were written."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class DataError(UserError):
    """Rows that cannot be trained on or scored."""


class NumericsError(UserError):
    """Training whose numbers are no longer finite."""


class MachineError(RuntimeError):
    """Something that neither the user nor this program did: a defect of the machine. Exit 1, without a traceback."""


class SecondaryFailure(RuntimeError):
    """This rank failed after another one did; that one reports the cause, so this one is silent."""


class LostStore(SecondaryFailure):
    """This rank failed, and the process that the ranks share their state by is gone."""


def listing(items: list[str], limit: int = 20) -> str:
    """`items` for a message: one a line, the first `limit`, then how many more."""
    lines = [f"  - {item}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"  ... and {len(items) - limit} more")
    return "\n".join(lines)


def shortened(text: object) -> str:
    """`text` for a message: its first 200 characters, and how many it has where that is more."""
    text = str(text)
    return text if len(text) <= REPEATED else f"{text[:REPEATED]}... ({len(text)} characters)"


def quoted(value: object) -> str:
    """A value that was given, as Python writes it, for a message."""
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # a whole number of thousands of digits; lists in lists without end
        return f"a {type(value).__name__} that is too large to show"


def short_words(text: str) -> str:
    """The text with its long words shortened: for messages of others, which repeat all that they were given."""
    return WORD.sub(lambda word: shortened(word[0]), text)


def short_lines(text: str) -> str:
    """The text with its lines cut that nobody reads to their end, whatever they repeat."""
    return "\n".join(x if len(x) <= LINE else f"{x[:LINE]}... ({len(x)} characters)" for x in text.split("\n"))


def unequal(values: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> list[str]:
    """One line for each name whose values, one a rank, are not all equal: who has which. hosts: one a rank."""
    lines = []
    for name, everyone in values.items():
        owners: dict[str, list[int]] = {}
        for rank, value in enumerate(everyone):
            owners.setdefault(value, []).append(rank)
        if len(owners) > 1:
            shares = [f"{shortened(value)} on {_who(ranks, hosts)}" for value, ranks in owners.items()]
            lines.append(f"{name}: {'; '.join(shares[:SHOWN_RANKS])}")
    return lines


def _who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    shown = [
        ", ".join(map(str, list(each)[:SHOWN_RANKS])) + ", ..." * (len(each) > SHOWN_RANKS) for each in (names, ranks)
    ]
    return f"{shown[0]} (rank {shown[1]})"
