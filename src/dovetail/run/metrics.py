"""metrics.jsonl, samples and loggers."""

import errno
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from dovetail.batch.routing import RoutingTrace
from dovetail.errors import Caught, naming, one_line
from dovetail.jsonl import ODD_LETTERS, Row, append, json_line
from dovetail.launch.process import without_secrets
from dovetail.recipe.tracking import LoggerSection
from dovetail.run.loggers import SAMPLES_EVERY, SHOWN_SAMPLES, RunFacts, grouped, start_logger

METRICS = "metrics.jsonl"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_WAITING = 64  # writes
TRIAL_SECONDS = 30.0  # for a logger to start
LAST_SECONDS = 10.0  # to send the rest
MAX_CAUSE = 500  # characters
MAX_SPANS = 4  # of steps, in a message
NUMBERS = ("step", "tokens", "step_seconds")  # of every row

Write = Callable[[], object]  # called again if it raises


class Records:
    """Ordered writes; those that meet a full disk are repeated."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: deque[Write] = deque()
        self._warned = False

    def write(self, write: Write) -> None:
        """Raises unless the disk is full and few writes wait."""
        self._waiting.append(write)
        try:
            self.flush()
        except OSError as error:
            if error.errno not in DISK_FULL or len(self._waiting) > MAX_WAITING:
                raise
            if not self._warned:
                self._say(
                    "THE DISK IS FULL, the run goes on and keeps in memory what it has to "
                    f"write: {error}"
                )
            self._warned = True

    def flush(self) -> None:
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()
        self._warned = False


def write_samples(path: Path, samples: Seq[Mapping[str, Any]]) -> None:
    with naming(path), path.open("w", encoding="utf-8", errors=ODD_LETTERS) as out:
        for sample in samples:
            out.write(
                json_line({name: value for name, value in sample.items() if name != "routing"})
            )
    write_routes(
        path.with_suffix(".routing.safetensors"), [sample["routing"] for sample in samples]
    )


def write_routes(path: Path, traces: Seq[RoutingTrace | None]) -> None:
    """indices [tokens, layers, K]; valid [tokens]; starts [samples + 1] into tokens; layers: numbers."""
    known = [trace for trace in traces if trace is not None]
    if not known:
        return
    whole = RoutingTrace.cat(known)
    last = int(whole.indices.max()) if whole.indices.numel() else 0
    narrow = torch.int32
    if last < 1 << 8:
        narrow = torch.uint8
    elif last < 1 << 16:
        narrow = torch.uint16
    starts = torch.tensor([0, *map(len, known)]).cumsum(0)
    layers = torch.tensor(whole.layers)
    tensors = {
        "indices": whole.indices.to(narrow),
        "valid": whole.valid,
        "starts": starts,
        "layers": layers,
    }
    content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    with naming(path):
        path.write_bytes(content)


class Metrics:
    """Rank 0 only. No logger stops a run."""

    def __init__(
        self, run: RunFacts, loggers: Seq[LoggerSection], say: Callable[[str], None]
    ) -> None:
        self._path = run.path / METRICS
        self._say = say
        self._loggers = [LoggerThread(section, run) for section in loggers]
        for logger in self._loggers:
            logger.start()
        until = time.monotonic() + TRIAL_SECONDS
        for logger in self._loggers:
            if not logger.tried.wait(max(until - time.monotonic(), 0.0)):
                self._say(
                    f"the logger {logger.name} gave no answer in {TRIAL_SECONDS:g} s; its rows wait"
                )
        self._drop_failed()

    def write(self, row: Row, samples: Seq[Row] = ()) -> None:
        append(self._path, row)
        self._drop_failed()
        shown = (
            samples[:SHOWN_SAMPLES] if row["step"] == 1 or row["step"] % SAMPLES_EVERY == 0 else ()
        )
        for logger in self._loggers:
            logger.rows.put((row["step"], grouped(row), shown))

    def close(self) -> None:
        for logger in self._loggers:
            logger.rows.put(None)
        for logger in self._loggers:
            logger.join(LAST_SECONDS)
            if logger.is_alive() or logger.cause:
                self._say(
                    f"the logger {logger.name} may lack rows "
                    f"({logger.cause or f'busy for {LAST_SECONDS:g} s'})"
                )

    def _drop_failed(self) -> None:
        for logger in [logger for logger in self._loggers if logger.cause]:
            self._say(
                f"the logger {logger.name} failed and gets no more; the run goes on "
                f"({logger.cause})"
            )
            self._loggers.remove(logger)


class LoggerThread(threading.Thread):
    def __init__(self, section: LoggerSection, run: RunFacts) -> None:
        super().__init__(name=section.name, daemon=True)
        self.section = section
        self.facts = run
        self.cause = ""  # of its failure
        self.tried = threading.Event()
        self.rows: queue.SimpleQueue[tuple[int, Mapping[str, float], Seq[Row]] | None] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        with Caught(BaseException) as caught:
            log, finish = start_logger(self.section, self.facts)
            self.tried.set()
            while (entry := self.rows.get()) is not None:
                log(*entry)
            finish()
        self.cause = without_secrets(one_line(caught.error))[:MAX_CAUSE]
        self.tried.set()


def read_rows(path: Path, last: int) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Returns the rows up to step `last` with rising steps, their lines, and all other lines."""
    text = ""
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace").rstrip("\n")
    rows: list[dict[str, Any]] = []
    kept: list[str] = []
    rest: list[str] = []
    newest = 0
    for line in text.split("\n") if text else []:
        row = _parsed_row(line)
        if row is not None and newest < row["step"] <= last:
            newest = row["step"]
            rows.append(row)
            kept.append(f"{line}\n")
        else:
            rest.append(f"{line}\n")
    return rows, kept, rest


def _parsed_row(line: str) -> dict[str, Any] | None:
    """Returns None for a line that is not a whole row of a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or "loss" not in row:
        return None
    numbers = [row.get(key) for key in NUMBERS]
    return row if all(type(number) in (int, float) for number in numbers) else None


def missing_rows(rows: Seq[Row], last: int) -> str:
    """Returns which of the steps 1 to `last` have no row, and which rows are kept; "": none."""
    kept = {row["step"] for row in rows}
    missing = [step for step in range(1, last + 1) if step not in kept]
    if not missing:
        return ""
    rest = [step for step in range(1, last + 1) if step in kept]
    rows_kept = f"the rows of {_spans(rest)} are kept" if rest else "no row is kept"
    return f"was lost or damaged: it has no row of {_spans(missing)}; {rows_kept}"


def _spans(steps: Seq[int]) -> str:
    """Returns a text such as `steps 1 to 3, 5`."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][-1] == step - 1:
            spans[-1] = [spans[-1][0], step]
        else:
            spans.append([step])
    texts = [" to ".join(map(str, span)) for span in spans[:MAX_SPANS]]
    more = [f"{len(spans) - MAX_SPANS} more"] if len(spans) > MAX_SPANS else []
    noun = "step" if len(steps) == 1 else "steps"
    return f"{noun} {', '.join(texts + more)}"
