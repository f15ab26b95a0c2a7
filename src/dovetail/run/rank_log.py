"""logs/rank-N.log of a run's directory."""

import io
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from dovetail.jsonl import ODD_LETTERS

LOGS = "logs"


def log_path(run: Path, rank: int) -> Path:
    return run / LOGS / f"rank-{rank}.log"


@contextmanager
def rank_log(path: Path, ranks: str, *, quiet: bool) -> Iterator[None]:
    """Copies stderr to a file. quiet: stdout and stderr go only there."""
    with ExitStack() as stack:
        with suppress(OSError):  # a run goes on without it
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", buffering=1, encoding="utf-8", errors=ODD_LETTERS))
            begun = datetime.now(UTC).isoformat(timespec="seconds")
            log.write(f"{begun}: {ranks} on {socket.gethostname()}, pid {os.getpid()}\n")
            output = cast("TextIO", _Output(log) if quiet else _Output(sys.stderr, log))
            stack.enter_context(redirect_stderr(output))
            if quiet:
                stack.enter_context(redirect_stdout(output))
        yield


def note_failure(path: Path, error: BaseException | None) -> None:
    if isinstance(error, Exception):
        with suppress(OSError), path.open("a", encoding="utf-8", errors=ODD_LETTERS) as log:
            traceback.print_exception(error, file=log)


class _Output(io.TextIOBase):
    """Writes to all streams; ignores full disks and closed pipes."""

    def __init__(self, *streams: TextIO) -> None:
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            with suppress(OSError):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            with suppress(OSError):
                stream.flush()

    def fileno(self) -> int:
        return self.streams[0].fileno()

    def isatty(self) -> bool:
        return self.streams[0].isatty()
