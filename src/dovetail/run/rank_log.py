"""One log a rank: logs/rank-N.log of a run's directory, to which every start appends."""

import io
import os
import socket
import sys
import traceback
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TextIO, cast

from dovetail.jsonl import ODD_LETTERS

LOGS = "logs"


def log_path(run: Path, rank: int) -> Path:
    return run / LOGS / f"rank-{rank}.log"


class RankLog:
    """Standard error of this process also goes to a file, from then on. quiet: only there, as does standard output."""

    def __init__(self, path: Path, ranks: str, *, quiet: bool) -> None:
        """ranks: for the line that each start begins with."""
        self.path, self.ranks, self.quiet = path, ranks, quiet
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with suppress(OSError):  # a run goes on without it
            self.path.parent.mkdir(parents=True, exist_ok=True)
            log = self._stack.enter_context(self.path.open("a", buffering=1, encoding="utf-8", errors=ODD_LETTERS))
            begun = datetime.now(UTC).isoformat(timespec="seconds")
            log.write(f"{begun}: {self.ranks} on {socket.gethostname()}, pid {os.getpid()}\n")
            output = cast("TextIO", _Output(log) if self.quiet else _Output(sys.stderr, log))
            self._stack.enter_context(redirect_stderr(output))
            if self.quiet:
                self._stack.enter_context(redirect_stdout(output))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def note_failure(path: Path, error: BaseException | None) -> None:
    """Append the traceback of an error."""
    if isinstance(error, Exception):
        with suppress(OSError), path.open("a", encoding="utf-8", errors=ODD_LETTERS) as log:
            traceback.print_exception(error, file=log)


class _Output(io.TextIOBase):
    """To all `streams`. A full disk, or nobody who reads, ends nothing."""

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
