"""JSON lines and objects."""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from dovetail.errors import CheckpointError, naming, quoted

Row = Mapping[str, Any]
ODD_LETTERS = "backslashreplace"  # half a surrogate pair becomes JSON's escape


def append(path: Path, row: Row) -> None:
    """Also after a torn line."""
    data = json_line(row).encode(errors=ODD_LETTERS)
    with naming(path), open(path, "a+b", buffering=0) as file:
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
    """Non-finite numbers become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=as_text) + "\n"
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, default=as_text) + "\n"


def as_text(value: object) -> str:
    """Some parquet writers store strings as bytes."""
    return value.decode(errors=ODD_LETTERS) if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RepeatedKeyError(ValueError):
    """A key stands twice in one JSON object."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that raises RepeatedKeyError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise RepeatedKeyError(f"the key {quoted(twice)} appears twice")
    return found


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Refuses repeated keys."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is not valid JSON: {str(error)[:200]}; fetch or write it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, expected an object")
    return value
