"""Files of rows: JSON lines, a JSON array, CSV, parquet or Arrow, also compressed; directories, globs, and the hub."""

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

from huggingface_hub import snapshot_download

from dovetail.data.paths import COMPRESSED, HUB_FILES, TABLES, data_files, hub_source
from dovetail.data.rows import JsonRow, parse_json
from dovetail.errors import DataError

GROUP = 1000  # rows of a table that are converted at a time


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows come from, and how they are read."""

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
    """The rows as they are."""
    source = as_source(source)
    hub = hub_source(source.path)
    if hub is None:
        for path in data_files(source.path):
            yield from _read_file(path)
        return
    if hub["files"] is None:
        yield from _hub_rows(source, hub["name"], hub["revision"])
        return
    try:
        files = [hub["files"], f"{hub['files']}/*"]
        folder = snapshot_download(hub["name"], repo_type="dataset", revision=hub["revision"], allow_patterns=files)
    except (OSError, ValueError) as error:
        raise DataError(f"{source.path} could not be fetched from the hub: {error}") from error
    for path in data_files(f"{folder}/{hub['files']}"):
        yield from _read_file(path)


def needs_text(source: Source | Path | str) -> bool:
    """Whether any row needs a tokenizer."""
    return any(not row.gives("input_ids", instead_of="prompt") for row in read_rows(source))


def _read_file(path: Path) -> Iterator[JsonRow]:
    kind = TABLES.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix, "json")
    if kind in ("parquet", "arrow"):
        for line, values in enumerate(_table_rows(path, kind), start=1):
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
                    raise DataError(f"{path}:{line}: a {type(values).__name__}, not a JSON object such as {{...}}")
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
            raise row.error(f"more or fewer cells than the {len(names)} of the first line; quote commas")
        yield row


def _table_rows(path: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    errors = (ValueError, OSError, ArithmeticError, NotImplementedError)  # or dates too far away
    try:
        if kind == "parquet":
            file = _pyarrow(".parquet", path).ParquetFile(path)
            names, batches = file.schema_arrow.names, file.iter_batches(GROUP)
        else:
            file = _arrow_file(path)
            names, batches = file.schema.names, _arrow_batches(file)
        _refuse_twice(names, path)
        for batch in batches:
            yield from batch.to_pylist()
    except DataError:
        raise
    except errors as error:
        raise DataError(f"{path}: not readable as {kind} ({error}); write it again, or give JSONL") from error


def _arrow_file(path: Path) -> Any:
    """datasets writes streams, feather and others files."""
    arrow = _pyarrow("", path)
    try:
        return arrow.ipc.open_file(arrow.memory_map(str(path)))
    except arrow.ArrowInvalid:
        return arrow.ipc.open_stream(arrow.memory_map(str(path)))


def _arrow_batches(file: Any) -> Iterable[Any]:
    return (file.get_batch(i) for i in range(file.num_record_batches)) if hasattr(file, "num_record_batches") else file


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(f"pyarrow{module}")
    except ImportError as error:
        what = "parquet" if module else path.suffix
        raise DataError(f"{path}: {what} needs pyarrow: pip install 'dovetail-rl[parquet]', or give JSONL") from error


def _refuse_twice(names: Iterable[str], path: Path) -> None:
    seen = list(names)
    if twice := next((name for name in seen if seen.count(name) > 1), None):
        raise DataError(f"{path}: several columns are named {twice!r}; rename all but one")


def _hub_rows(source: Source, name: str, revision: str) -> Iterator[JsonRow]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{source.path}: datasets of the hub need the library datasets: pip install 'dovetail-rl[datasets]', or name files "
            f"of it: {HUB_FILES}{name}@{revision}/FILES"
        ) from error
    load: Callable[..., Any] = library.load_dataset
    try:
        rows = load(name, source.subset, revision=revision, split=source.split)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        raise DataError(f"{source.path} could not be loaded from the hub: {error}") from error
    place, line = Path(name), 0
    for table in rows.with_format("arrow").iter(GROUP):
        for values in table.to_pylist():
            line += 1
            yield JsonRow(values, place, line)
