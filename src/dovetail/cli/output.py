"""Where a command's rows go: a JSONL file, written whole or not at all, by one rank for all."""

import math
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.mesh import Mesh
from dovetail.metrics import ODD_LETTERS, json_line
from dovetail.weights.agree import agreed
from dovetail.weights.staging import refuse_unwritable


def check_out(path: Path | str, data: Path | str, mesh: Mesh) -> None:
    """Refuse a place where `write_rows` could not write, and the file `data` itself, before the work is done.

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
        sys.stderr.writelines(f"dovetail: note: {note}\n" for note in notes)


def write_rows(path: Path | str, rows: Iterable[Mapping[str, Any]], mesh: Mesh) -> None:
    """Write `rows` to `path`, or where it leads as a link, by the first rank. Collective: what goes wrong there is raised
    everywhere.

    A line on stderr counts the rows with numbers that are not finite, which become null.
    """
    path = Path(os.path.realpath(path))
    with agreed(mesh, path):
        if mesh["world"].rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")  # two commands may write at once
            odd = written = 0
            try:
                with staged.open("w", encoding="utf-8", errors=ODD_LETTERS) as out:
                    for row in rows:
                        out.write(json_line(row))
                        odd, written = odd + (not _is_finite(row)), written + 1
                os.replace(staged, path)
            finally:  # where the disk is full, or a signal ends the command
                staged.unlink(missing_ok=True)
            if odd:
                sys.stderr.write(
                    f"dovetail: {odd} of {written} rows of {path} hold numbers that are not finite, written as null; look for "
                    "such numbers in the weights, or try --dtype float32\n"
                )


def _is_finite(row: Mapping[str, Any]) -> bool:
    numbers = (x for value in row.values() if isinstance(value, list) for x in value if isinstance(x, float))
    return all(map(math.isfinite, numbers))
