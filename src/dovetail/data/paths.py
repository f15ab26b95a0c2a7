"""Paths of rows: files, directories, globs, and names on the hub. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from glob import glob, has_magic
from pathlib import Path

from dovetail.errors import DataError, quoted
from dovetail.weights.config_file import COMMIT, newest_commit

TABLES: Mapping[str, str] = {
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv",
}  # fmt: skip
SUFFIXES = (".jsonl", ".ndjson", ".json", *TABLES)
COMPRESSED = (".gz", ".zst")
NOT_ROWS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "state.json"}
)  # of the library datasets
HUB_FILES = "hf://datasets/"
HUB_NAME = re.compile(
    r"(?:hf://datasets/)?(?P<name>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^/]*))?(?:/(?P<files>.+))?"
)


def hub_source(path: str) -> re.Match[str] | None:
    """Groups `name`, `revision` (a commit) and `files`; None for other paths."""
    hub = HUB_NAME.fullmatch(path)
    is_address = path.startswith(HUB_FILES)
    if hub is None or not (is_address or (hub["revision"] is not None and not Path(path).exists())):
        if is_address:
            raise DataError(
                f"{path}: expected {HUB_FILES}OWNER/NAME@COMMIT, with /FILES behind it or not"
            )
        return None
    if hub["revision"] is None or not COMMIT.fullmatch(hub["revision"]):
        raise DataError(
            f"{path}: {quoted(hub['revision'] or 'no revision')} is not a commit; a branch or "
            "tag can move, so give the 40 "
            f"hexadecimal digits of one: {hub['name']}@COMMIT "
            f"({newest_commit('datasets/' + hub['name'])})"
        )
    return hub


def data_files(path: str) -> list[Path]:
    here = Path(path)
    if here.is_file():
        return [here]
    files: Iterable[Path] = ()
    if here.is_dir():
        files = here.rglob("*")
    elif has_magic(path):
        files = map(Path, glob(path, recursive=True))
    known = sorted(
        file
        for file in files
        if file.is_file() and (has_magic(path) or _is_data(file.relative_to(here)))
    )
    if known:
        return known
    if here.is_dir():
        raise DataError(
            f"{path}: no data file in this directory; expected names that end in "
            f"{', '.join(SUFFIXES)}"
        )
    remedy = "give the path of a .jsonl or .parquet file, or of a directory of them"
    if HUB_NAME.fullmatch(path) and not Path(path).suffix:
        remedy += f"; for a dataset of the hub, pin it to a commit: {path}@COMMIT ({newest_commit('datasets/' + path)})"
    raise DataError(
        f"{path}: {'no file matches' if has_magic(path) else 'no such data file'}; {remedy}"
    )


def _is_data(path: Path) -> bool:
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return (
        plain.suffix in SUFFIXES
        and path.name not in NOT_ROWS
        and not any(p.startswith(".") for p in path.parts)
    )
