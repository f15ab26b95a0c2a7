"""Long lines in a terminal, cut between words."""

import re
import shutil
import textwrap
from typing import TextIO

_LABEL = re.compile(r"\S+ {2,}")


def for_terminal(text: str, stream: TextIO) -> str:
    """Wrap the lines of a text if `stream` is a terminal."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(wrapped(line, width) for line in text.split("\n"))


def wrapped(line: str, width: int) -> str:
    """The line in rows of at most `width` columns, further ones indented as far as its label."""
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    indent = 2 if label is None else len(label[0])
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
