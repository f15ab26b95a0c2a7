"""Rows of JSON: one line each, written whole or not at all."""

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
ODD_LETTERS = "backslashreplace"  # half a surrogate pair, which UTF-8 lacks, becomes the escape that JSON has for it


def append(path: Path, row: Row) -> None:
    """Write a row behind those that are there, of which a kill may have cut the last: its whole line, or nothing of it where
    that fails."""
    data = json_line(row).encode(errors=ODD_LETTERS)
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data
        write_whole(file, data)


def write_whole(file: FileIO, data: bytes) -> None:
    """All of `data` at the file's end, or nothing of it where that fails."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def json_line(row: Row) -> str:
    """One line of JSON, which knows no numbers that are not finite: they become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=as_text) + "\n"
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, default=as_text) + "\n"


def as_text(value: object) -> str:
    """What JSON has no word for. Bytes are the text that they hold: some writers of parquet store strings so."""
    return value.decode(errors=ODD_LETTERS) if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
