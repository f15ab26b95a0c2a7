"""Files of rows: JSON lines, JSON arrays, CSV, parquet, Arrow, also compressed, and the hub."""

import codecs
import csv
import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dovetail.data.paths import COMPRESSED, HUB_FILES, TABLES, data_files, hub_source
from dovetail.data.rows import JsonRow, parse_json
from dovetail.errors import DataError

GROUP = 1000  # rows of a table converted at a time


@dataclass(frozen=True, kw_only=True)
class Source:
    path: str  # or glob, directory, hub name
    subset: str | None = None  # of a hub name
    split: str = "train"
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # ours -> theirs
    chat: bool = False  # a prompt that is a string becomes a user's message
    prefix: str = ""  # of the ids of rows without one


def as_source(source: Source | Path | str) -> Source:
    return source if isinstance(source, Source) else Source(path=str(source))


def read_rows(source: Source | Path | str) -> Iterator[JsonRow]:
    source = as_source(source)
    hub = hub_source(source.path)
    place = source.path
    if hub is not None and hub["files"] is None:
        yield from _hub_rows(source, hub["name"], hub["revision"])
        return
    if hub is not None:
        name = hub["name"]
        revision = hub["revision"]
        files = hub["files"]
        try:
            patterns = [files, f"{files}/*"]
            fetch = importlib.import_module("huggingface_hub").snapshot_download
            folder = fetch(name, repo_type="dataset", revision=revision, allow_patterns=patterns)
            place = f"{folder}/{files}"
        except (OSError, ValueError) as error:
            raise DataError(f"{source.path} could not be fetched from the hub: {error}") from error
    for path in data_files(place):
        yield from read_file(path)


def needs_text(source: Source | Path | str) -> bool:
    """Whether any row needs a tokenizer."""
    return any(not row.gives("input_ids", instead_of="prompt") for row in read_rows(source))


def read_file(path: Path, group: int = GROUP) -> Iterator[JsonRow]:
    """The rows of a file. group: rows of a table converted at a time."""
    kind = TABLES.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix, "json")
    if kind in ("parquet", "arrow"):
        for line, values in enumerate(_table_rows(path, kind, group), start=1):
            yield JsonRow(values, path, line)
        return
    try:
        with _opened(path) as file:
            yield from _csv_rows(file, path) if kind == "csv" else _json_rows(file, path)
    except (OSError, EOFError, zlib.error, csv.Error, UnicodeError) as error:
        raise DataError(f"{path}: not readable ({error}); write it again, or give JSONL") from error


def _opened(path: Path) -> Any:  # a binary file
    if path.suffix == ".zst":
        return io.BufferedReader(_pyarrow("", path).input_stream(str(path), compression="zstd"))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _json_rows(file: IO[bytes], path: Path) -> Iterator[JsonRow]:
    if ".json" in path.suffixes[-2:]:
        start = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()
        file.seek(0)
        if start.startswith(b"["):
            for line, values in enumerate(parse_json(file.read(), str(path), list), start=1):
                if not isinstance(values, dict):
                    raise DataError(
                        f"{path}:{line}: a {type(values).__name__}, not a JSON object such as "
                        f"{{...}}"
                    )
                yield JsonRow(values, path, line)
            return
    for line, text in enumerate(file, start=1):
        if text.strip():
            yield JsonRow(parse_json(text, f"{path}:{line}"), path, line)


def _csv_rows(file: IO[bytes], path: Path) -> Iterator[JsonRow]:
    rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    names = rows.fieldnames or ()
    _refuse_twice(names, path)
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise DataError(f"{path}: cells are separated by {other!r}; expected commas")
    for values in rows:
        row = JsonRow(values, path, rows.line_num)
        if None in values or None in values.values():
            raise row.error(
                f"more or fewer cells than the {len(names)} of the first line; quote commas"
            )
        yield row


def _table_rows(path: Path, kind: str, group: int) -> Iterator[Mapping[str, Any]]:
    errors = (ValueError, OSError, ArithmeticError, NotImplementedError)  # or dates too far away
    try:
        if kind == "parquet":
            file = _pyarrow(".parquet", path).ParquetFile(path)
            names = file.schema_arrow.names
            batches = file.iter_batches(group)
        else:
            table = _arrow_table(path)
            names = table.schema.names
            batches = table.to_batches(group)
        _refuse_twice(names, path)
        for batch in batches:
            yield from batch.to_pylist()
    except DataError:
        raise
    except errors as error:
        raise DataError(
            f"{path}: not readable as {kind} ({error}); write it again, or give JSONL"
        ) from error


def _arrow_table(path: Path) -> Any:
    """Opens the table of a file, or of a stream, which datasets writes."""
    arrow = _pyarrow("", path)
    try:
        return arrow.ipc.open_file(arrow.memory_map(str(path))).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(f"pyarrow{module}")
    except ImportError as error:
        what = "parquet" if module else path.suffix
        raise DataError(
            f"{path}: {what} needs pyarrow: pip install 'dovetail-rl[parquet]', or give JSONL"
        ) from error


def _refuse_twice(names: Iterable[str], path: Path) -> None:
    seen = list(names)
    if twice := next((name for name in seen if seen.count(name) > 1), None):
        raise DataError(f"{path}: several columns are named {twice!r}; rename all but one")


def _hub_rows(source: Source, name: str, revision: str) -> Iterator[JsonRow]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{source.path}: datasets of the hub need the library datasets: pip install "
            "'dovetail-rl[datasets]', or name files "
            f"of it: {HUB_FILES}{name}@{revision}/FILES"
        ) from error
    load: Callable[..., Any] = library.load_dataset
    try:
        rows = load(name, source.subset, revision=revision, split=source.split)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        raise DataError(f"{source.path} could not be loaded from the hub: {error}") from error
    place = Path(name)
    line = 0
    for table in rows.with_format("arrow").iter(GROUP):
        for values in table.to_pylist():
            line += 1
            yield JsonRow(values, place, line)
