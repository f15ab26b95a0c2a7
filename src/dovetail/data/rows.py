"""The rows of a JSONL or parquet file, and those of a step. Errors name file and line."""

import importlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dovetail.errors import DataError, shortened

MAX_DEPTH = 100  # lists and objects inside each other
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes, which json accepts


@dataclass(frozen=True)
class JsonRow:
    values: Mapping[str, Any]
    path: Path
    line: int  # from 1; of parquet the row

    def error(self, message: str) -> DataError:
        return DataError(f"{self.path}:{self.line}: {message}")

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add file and line to a DataError of the block."""
        try:
            yield
        except DataError as error:
            raise self.error(str(error)) from error

    def gives(self, name: str, instead_of: str) -> bool:
        """Whether the row has `name`. A null counts as missing if `instead_of` is there."""
        return name in self.values and (self.values[name] is not None or instead_of not in self.values)

    def id(self, index: int) -> Any:
        own = self.values.get("id")
        return index if own is None else own

    def require(self, *names: str) -> None:
        missing = [name for name in names if name not in self.values]
        if missing:
            has = shortened(", ".join(map(repr, self.values)) or "nothing")
            raise self.error(f"the row lacks {', '.join(map(repr, missing))} (it has {has}); add the key to the row")


def read_rows(path: Path | str) -> Iterator[JsonRow]:
    """Rows of a .parquet file, or of any other file as JSON lines."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such data file; give the path of a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with path.open("rb") as lines:
        for line, text in enumerate(lines, start=1):
            if text.strip():
                yield JsonRow(_parse(text, f"{path}:{line}"), path, line)


def is_deep(values: Any) -> bool:
    """Deeper than `MAX_DEPTH`."""
    level, depth = [values], 0
    while level and depth <= MAX_DEPTH:
        inside = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level, depth = [item for item in inside if isinstance(item, dict | list)], depth + 1
    return depth > MAX_DEPTH


def needs_text(path: Path | str) -> bool:
    """Whether any row needs a tokenizer."""
    return any(not row.gives("input_ids", instead_of="prompt") for row in read_rows(path))


def batch_rows(num_rows: int, count: int, seed: int | None, start: int) -> list[int]:
    """`count` rows from the `start`-th of an endless stream of epochs, shuffled unless `seed` is None. Stateless."""
    stream = range(start, start + count)
    orders = {epoch: _epoch_order(num_rows, seed, epoch) for epoch in {at // num_rows for at in stream}}
    return [orders[at // num_rows][at % num_rows] for at in stream]


def _parse(text: bytes, place: str) -> dict[str, Any]:
    deep = DataError(f"{place}: lists and objects inside each other more than {MAX_DEPTH} deep; make it flat")
    try:
        values = json.loads(text.rstrip())
    except RecursionError as error:
        raise deep from error
    except ValueError as error:  # bad JSON, or bad UTF-8
        raise DataError(f"{place}: not JSON ({error}); each line must be one JSON object") from error
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_deep(values):
        raise deep
    if not isinstance(values, dict):
        raise DataError(f"{place}: a {type(values).__name__}, not a JSON object such as {{...}}")
    if SURROGATE.search(text):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = f"{place}: half of a surrogate pair, which no text can hold; write the character itself"
            raise DataError(message) from error
    return values


def _read_parquet(path: Path) -> Iterator[JsonRow]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow: pip install 'dovetail[parquet]', or give JSONL") from error
    row = 0
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"several columns are named {twice!r}")
        for group in file.iter_batches():
            for values in group.to_pylist():
                row += 1
                yield JsonRow(values, path, row)
    except (ValueError, OSError, ArithmeticError, NotImplementedError) as error:  # or dates too far away
        raise DataError(f"{path}: not readable as parquet ({error}); write it again, or give JSONL") from error


@lru_cache(maxsize=2)  # a million rows take half a second
def _epoch_order(num_rows: int, seed: int | None, epoch: int) -> Sequence[int]:
    if seed is None:
        return range(num_rows)
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
