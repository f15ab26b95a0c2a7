"""Ends a benchmark's rank whose row takes too long, or that is asked to end; the first rank says in one line which row it was."""

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

LATE_SECONDS = (
    2.0  # from the first rank's line to the end of any: a launcher ends all when one ends
)
ENDED = 128 + signal.SIGTERM  # the exit status that shells give for it


class Limit:
    """Of one process, from its main thread. `rank`: of this process; `seconds`: of a row; `stacks`: a file for stack dumps.

    A thread watches, so a main thread that waits for a device is no hindrance.
    """

    def __init__(self, name: str, rank: int, seconds: float, stacks: Path) -> None:
        self.name, self.rank, self.seconds, self.path = name, rank, seconds, stacks
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = open(stacks, "w", encoding="utf-8")  # noqa: SIM115 -- closed by `close`
        self._signals, told = os.pipe()
        os.set_blocking(told, False)
        signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # the number of the signal goes to the pipe at once
        signal.set_wakeup_fd(told)
        self._closed = threading.Event()
        self.begin("before the first row")
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, row: str) -> None:
        """A row begins, and with it a new limit."""
        self.row, self.begun = row, time.monotonic()
        faulthandler.cancel_dump_traceback_later()  # the last resort, where no thread of Python can run
        faulthandler.dump_traceback_later(
            self.seconds + 2 * LATE_SECONDS, exit=True, file=self._stacks
        )

    def at(self, part: str) -> None:
        """The row has come to some part of it."""
        self.row = f"{self.row.partition(':')[0]}: {part}"

    @property
    def terminal(self) -> TextIO:
        """Where to tell of an error: in the file of stacks, where it comes from a rank that has left for this limit."""
        return self._stacks if time.monotonic() - self.begun >= self.seconds else sys.stderr

    def close(self) -> None:
        """No more limit; the file of stacks goes where it is empty. A signal acts as usual again."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._stacks.close()
        if not self.path.stat().st_size:
            self.path.unlink()

    def _watch(self) -> None:
        while not self._closed.is_set():
            passed, limit = (
                time.monotonic() - self.begun,
                self.seconds + (LATE_SECONDS if self.rank else 0.0),
            )
            if passed >= limit:
                self._leave(1, f"not done within {self.seconds:g} s", LATE_SECONDS)
            if select.select([self._signals], [], [], limit - passed)[0]:
                if signal.SIGTERM in os.read(self._signals, 1):
                    self._leave(
                        ENDED, f"cut off by SIGTERM after {time.monotonic() - self.begun:.0f} s"
                    )

    def _leave(self, status: int, why: str, patience: float = 0.0) -> None:
        """End the process. Its normal end would wait for kernels that wait for other ranks."""
        faulthandler.dump_traceback(self._stacks)
        if self.rank == 0:
            print(
                f"{self.name}: {self.row}: {why}; where it was: {self.path}",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(patience)
        os._exit(status)
