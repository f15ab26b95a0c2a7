"""What commands share: the mesh, the model's files, and a JSONL file that the first rank writes."""

import argparse
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from typing import Any, Self, TypeVar

from dovetail.cli.preflight import check_out
from dovetail.data.encode import Tokenizer
from dovetail.data.files import needs_text
from dovetail.data.processor import Processor
from dovetail.errors import ConfigError
from dovetail.factory.engine import make_mesh
from dovetail.factory.tokenizer import load_processor, load_tokenizer
from dovetail.jsonl import ODD_LETTERS, json_line, write_whole
from dovetail.launch.process import complain
from dovetail.parallel.consensus import agreed
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import pick_device
from dovetail.weights.hf_directory import Pretrained

Row = TypeVar("Row")


def mesh_of(args: argparse.Namespace) -> Mesh:
    return make_mesh(Layout.parse(args.layout or ""), pick_device(args.device))


def open_inputs(
    args: argparse.Namespace, mesh: Mesh, *, decodes: bool = False
) -> tuple[Pretrained, Tokenizer | None, Processor | None]:
    """Check --out and open --model. decodes: the output needs a tokenizer, if there is one."""
    if mesh["world"].rank == 0:
        check_out(args.out, args.data)
    source, trust = Pretrained.open(args.model, args.engine), args.trust_remote_code
    reads_text = needs_text(args.data) or (decodes and source.has_tokenizer)
    tokenizer = load_tokenizer(source, trust_remote_code=trust) if reads_text else None
    return source, tokenizer, load_processor(source, trust_remote_code=trust)


def say(notes: Iterable[str], mesh: Mesh) -> None:
    if mesh["world"].rank == 0:
        for note in notes:
            complain(f"dovetail: note: {note}\n")


class RowFile:
    """A JSONL file, `OUT.xxxxxxxx.part` until the `with` block ends well. The first rank writes; errors reach all ranks."""

    def __init__(self, path: Path | str, mesh: Mesh) -> None:
        self.path, self.mesh = Path(os.path.realpath(path)), mesh
        self.part = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:8]}.part")
        self._file: FileIO | None = None
        self._written = self._not_finite = 0

    def __enter__(self) -> Self:
        with agreed(self.mesh):
            if self.mesh["world"].rank == 0:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = FileIO(self.part, "x")
                except OSError as error:
                    problem = f"{error.strerror}: {error.filename}"
                    raise ConfigError(f"--out {self.path} cannot be written: {problem}; give another path") from error
        return self

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with agreed(self.mesh, self.path):
            if self._file is not None:
                for row in rows:
                    write_whole(self._file, json_line(row).encode(errors=ODD_LETTERS))
                    self._written += 1
                    self._not_finite += not _is_finite(row)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with nullcontext() if error else agreed(self.mesh, self.path):
                if self._file is not None:
                    self._file.close()
                    if error is None:
                        os.replace(self.part, self.path)
        finally:
            if self._not_finite:
                complain(
                    f"dovetail: {self._not_finite} of {self._written} rows of {self.path} hold numbers that are not finite, "
                    "written as null; look for such numbers in the weights, or try --dtype float32\n"
                )
            if self._written and self.part.exists():
                complain(f"dovetail: not finished; the first {self._written} rows are in {self.part}\n")
            elif self._file is not None:
                self.part.unlink(missing_ok=True)


def portions(rows: Sequence[Row], cost: Callable[[Row], int], most: int) -> Iterator[Sequence[Row]]:
    """`rows` in parts that cost at most `most`, or of one row."""
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
