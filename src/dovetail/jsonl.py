"""JSON lines, written whole or not at all."""

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
ODD_LETTERS = "backslashreplace"  # half a surrogate pair becomes JSON's escape


def append(path: Path, row: Row) -> None:
    """Append a row, also after one that a kill has cut."""
    data = json_line(row).encode(errors=ODD_LETTERS)
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data
        write_whole(file, data)


def write_whole(file: FileIO, data: bytes) -> None:
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def json_line(row: Row) -> str:
    """Numbers that are not finite become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=as_text) + "\n"
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, default=as_text) + "\n"


def as_text(value: object) -> str:
    """A value of no JSON type. Some writers of parquet store strings as bytes."""
    return value.decode(errors=ODD_LETTERS) if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
