"""Where a command's rows go: a JSONL file that one rank writes for all, at its place when it is whole."""

import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dovetail.errors import ConfigError
from dovetail.jsonl import ODD_LETTERS, json_line, write_whole
from dovetail.launch.streams import complain
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import refuse_unwritable

Row = TypeVar("Row")


def check_out(path: Path | str, data: Path | str, mesh: Mesh) -> None:
    """Refuse a place where a `RowFile` could not be, and the file `data` itself, before the work is done.

    The first rank looks.
    """
    path = Path(path)
    if mesh["world"].rank == 0:
        if path.is_dir():
            raise ConfigError(f"--out {path} is a directory; give the path of a file")
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"--out {path} is a device or a pipe, which a file would replace; give the path of a file"
            )
        if path.exists() and Path(data).exists() and path.samefile(data):
            raise ConfigError(f"--out {path} is the file that --data names, and would replace it; give another path")
        refuse_unwritable(Path(os.path.realpath(path)), "--out")


def say(notes: Iterable[str], mesh: Mesh) -> None:
    """Lines on stderr, by the first rank."""
    if mesh["world"].rank == 0:
        for note in notes:
            complain(f"dovetail: note: {note}\n")


class RowFile:
    """Rows as they are computed: in `OUT.xxxxxxxx.part` until the `with` block ends well, then at OUT, or where that leads as
    a link.

    The first rank writes. Entering, leaving well and `write` are collective: what goes wrong there is raised everywhere. A
    command that ends before leaves the part with the rows so far, all of them whole, and a line on stderr that names it.
    """

    def __init__(self, path: Path | str, mesh: Mesh) -> None:
        self.path, self.mesh = Path(os.path.realpath(path)), mesh
        self.part = self.path.with_name(
            f"{self.path.name}.{uuid.uuid4().hex[:8]}.part"
        )  # two commands may write at once
        self._file: FileIO | None = None
        self._written = self._odd = 0

    def __enter__(self) -> Self:
        with agreed(self.mesh):
            if self.mesh["world"].rank == 0:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = FileIO(self.part, "x")
                except OSError as error:
                    raise ConfigError(
                        f"--out {self.path} cannot be written: {error.strerror}: {error.filename}; give another path"
                    ) from error
        return self

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write further rows; numbers that are not finite become null."""
        with agreed(self.mesh, self.path):
            if self._file is not None:
                for row in rows:
                    write_whole(self._file, json_line(row).encode(errors=ODD_LETTERS))
                    self._odd, self._written = self._odd + (not _is_finite(row)), self._written + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        try:
            if error is None:
                with agreed(self.mesh, self.path):
                    if self._file is not None:
                        os.replace(self.part, self.path)
        finally:
            if self._file is not None:
                self._settle()

    def _settle(self) -> None:
        """Say what is out of the ordinary: rows that are not at their place, and numbers that are not finite."""
        if self._odd:
            complain(
                f"dovetail: {self._odd} of {self._written} rows of {self.path} hold numbers that are not finite, written as "
                "null; look for such numbers in the weights, or try --dtype float32\n"
            )
        if self.part.exists() and self._written:
            complain(f"dovetail: not finished; the first {self._written} rows are in {self.part}\n")
        else:
            self.part.unlink(missing_ok=True)


def portions(rows: Sequence[Row], cost: Callable[[Row], int], most: int) -> Iterator[Sequence[Row]]:
    """`rows` in order, in parts of at most `most` together, or of one row."""
    first = total = 0
    for i, row in enumerate(rows):
        if i > first and total + cost(row) > most:
            yield rows[first:i]
            first, total = i, 0
        total += cost(row)
    if rows:
        yield rows[first:]


def _is_finite(row: Mapping[str, Any]) -> bool:
    numbers = (x for value in row.values() if isinstance(value, list) for x in value if isinstance(x, float))
    return all(map(math.isfinite, numbers))
