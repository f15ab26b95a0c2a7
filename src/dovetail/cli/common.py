"""Shared by commands: mesh, inputs, and the JSONL output."""

import argparse
import fcntl
import hashlib
import math
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar

import dovetail
from dovetail.cli.preflight import check_out
from dovetail.data.encode import Tokenizer
from dovetail.data.examples import Prompt
from dovetail.data.files import needs_text
from dovetail.data.processor import Processor
from dovetail.errors import ConfigError, raise_disk_problem
from dovetail.factory.engine import make_mesh
from dovetail.factory.tokenizer import load_processor, load_tokenizer
from dovetail.jsonl import ODD_LETTERS, json_line, write_whole
from dovetail.launch.process import complain, tell
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import pick_device
from dovetail.run.console import Console
from dovetail.run.state import sampled_fingerprint
from dovetail.weights.hf_directory import Pretrained

Row = TypeVar("Row")


def mesh_of(args: argparse.Namespace) -> Mesh:
    return make_mesh(Layout.parse(args.layout or ""), pick_device(args.device))


def open_inputs(
    args: argparse.Namespace, mesh: Mesh, *, decodes: bool = False
) -> tuple[Pretrained, Tokenizer | None, Processor | None]:
    """decodes: the output needs a tokenizer, if there is one."""
    if args.out is not None and mesh["world"].rank == 0:
        check_out(args.out, args.data)
    source = Pretrained.open(args.model, args.engine, args.adapter)
    trust = args.trust_remote_code
    reads_text = needs_text(args.data) or (decodes and source.has_tokenizer)
    tokenizer = load_tokenizer(source, trust_remote_code=trust) if reads_text else None
    return source, tokenizer, load_processor(source, trust_remote_code=trust)


def say(notes: Iterable[str], mesh: Mesh) -> None:
    if mesh["world"].rank == 0:
        for note in notes:
            complain(f"dovetail: note: {note}\n")


class RowFile:
    """A JSONL file, `OUT.xxxxxxxx.part` until the `with` block ends well. The first rank writes; errors reach all ranks.

    job: fingerprint of a command, which goes on with the part of its earlier start. total: rows, for the progress.
    """

    def __init__(self, path: Path | str, mesh: Mesh, job: str = "", total: int = 0) -> None:
        self.given = path
        self.path = Path(os.path.realpath(path))
        self.mesh = mesh
        self.job = job
        self.part = self._part(job or uuid.uuid4().hex)
        self._file: FileIO | None = None
        self._written = self._tokens = self._not_finite = 0
        self.total = total
        self.is_shown = mesh["world"].rank == 0 and total > 0
        self._console = Console(speaks=self.is_shown, stderr=True)

    def _part(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{name[:8]}.part")

    def __enter__(self) -> Self:
        with agreed(self.mesh):
            if self.mesh["world"].rank == 0:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self._opened()
                except OSError as error:
                    raise_disk_problem(error, self.path)
                    problem = f"{error.strerror}: {error.filename}"
                    raise ConfigError(
                        f"--out {self.path} cannot be written: {problem}; give another path"
                    ) from error
        self._console.start()
        self._console.phase("rows", 0, 0, 0)
        return self

    def _opened(self) -> FileIO:
        if self.job:
            file = FileIO(os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
            with suppress(BlockingIOError):  # the same command runs right now
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.part.exists() and os.path.samestat(
                    os.fstat(file.fileno()), self.part.stat()
                ):
                    return file
            file.close()
            self.part = self._part(uuid.uuid4().hex)
        return FileIO(self.part, "x+")

    def missing(self, parts: Iterable[Sequence[Row]], each: int = 1) -> Iterator[Sequence[Row]]:
        """Parts that are not yet in the file. each: output rows per row."""
        kept = 0
        parts = list(parts)
        with agreed(self.mesh, self.path):
            if self._file is not None:
                ends = [0, *accumulate(len(line) for line in self._file if line.endswith(b"\n"))]
                for part in parts:
                    if kept + len(part) * each >= len(ends):
                        break
                    kept += len(part) * each
                self._file.truncate(ends[kept])
                self._written = kept
                if kept:
                    complain(
                        f"dovetail: going on after {kept} rows of an earlier start, kept in "
                        f"{self.part}\n"
                    )
        self.advance(0, self.total, 0)
        kept = of_first(kept, self.mesh)
        rows = 0
        for part in parts:
            rows += len(part) * each
            if rows > kept:
                yield part

    def advance(self, done: int, _: int, tokens: int) -> None:
        """Shows rows that were made, after those that are written."""
        self._console.phase("rows", self._written + done, self.total, self._tokens + tokens)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with agreed(self.mesh, self.path):
            if self._file is not None:
                for row in rows:
                    write_whole(self._file, json_line(row).encode(errors=ODD_LETTERS))
                    self._written += 1
                    self._not_finite += not _is_finite(row)
                    self._tokens += len(row.get("token_ids", ()))
                self.advance(0, self.total, 0)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with nullcontext() if error else agreed(self.mesh, self.path):
                if self._file is not None:
                    if error is None:
                        os.replace(self.part, self.path)
                        tell(f"wrote {self._written} rows to {self.given}\n" if self.job else "")
                    self._file.close()
        finally:
            self._console.stop()
            if self._not_finite:
                rows = f"{self._not_finite} of {self._written} rows of {self.path} hold numbers that are not finite"
                complain(
                    f"dovetail: {rows}, written as null; check the weights, or try --dtype "
                    "float32\n"
                )
            if self._written and self.part.exists():
                complain(
                    f"dovetail: not finished; the first {self._written} rows are in {self.part}\n"
                )
            elif self._file is not None:
                self.part.unlink(missing_ok=True)


def fingerprint_of(args: argparse.Namespace, source: Pretrained, rows: Iterable[Prompt]) -> str:
    """Returns the fingerprint of flags, model and rows."""
    flags = {name: value for name, value in vars(args).items() if name != "out"}
    digest = hashlib.sha256(
        f"{dovetail.__version__} {sampled_fingerprint(source)} {sorted(flags.items())}".encode()
    )
    for row in rows:
        digest.update(f"{row.id!r} {row.media!r}".encode(errors=ODD_LETTERS))
        digest.update(array("q", row.ids).tobytes())
    return digest.hexdigest()


def portions(rows: Sequence[Row], cost: Callable[[Row], int], most: int) -> Iterator[Sequence[Row]]:
    """Parts that cost at most `most`, or have one row."""
    first = total = 0
    for i, row in enumerate(rows):
        if i > first and total + cost(row) > most:
            yield rows[first:i]
            first = i
            total = 0
        total += cost(row)
    if rows:
        yield rows[first:]


def _is_finite(row: Mapping[str, Any]) -> bool:
    numbers = (
        x
        for value in row.values()
        if isinstance(value, list)
        for x in value
        if isinstance(x, float)
    )
    return all(map(math.isfinite, numbers))
