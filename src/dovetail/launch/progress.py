"""Where a rank is: told by its main thread as it goes, kept in a small shared file, read by whoever watches the rank.

A rank progresses when its main thread enters a phase. A beating thread alone would prove nothing: it beats on while the
main thread waits forever in a collective. Imports no torch.
"""

import mmap
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Phase = Literal[
    "init", "load", "run", "push", "rollout", "reward", "score", "update", "optimizer", "save", "eval", "exit"
]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Seconds after which a rank that is still in the same phase counts as hung; `run` is the whole of a score or generate.
LIMITS: Mapping[Phase, float] = {
    "init": 600.0, "load": 1800.0, "run": float("inf"), "push": 900.0, "rollout": 3600.0, "reward": 1800.0,
    "score": 1200.0, "update": 1200.0, "optimizer": 600.0, "save": 1800.0, "eval": 3600.0, "exit": 600.0,
}  # fmt: skip

SLACK_SECONDS, LONGEST_SECONDS = 120.0, 30 * 86400.0  # of `patience`

BEAT_SECONDS = 0.5
READ_ATTEMPTS = 5
_RECORD = struct.Struct("<QQqqd")  # version (odd while it is written), entries, phase, step (-1: none), since
_BEAT = struct.Struct("<d")
_BEAT_AT = 64
SIZE = 128


class State(NamedTuple):
    """What a rank last told. Times are of the machine's monotonic clock, the same in all of its processes."""

    entries: int  # how many phases its main thread has entered: equal on ranks that run the same program
    phase: Phase
    step: int | None  # from 1; None before the first one
    since: float  # when it entered the phase
    beat: float  # when it last ran any Python at all

    def where(self) -> str:
        return f"phase {self.phase}" + ("" if self.step is None else f", step {self.step}")


class Progress:
    """The telling side. Without a file it tells nobody but its owner, so libraries and tests need not care."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _mapped(path)
        self._entries, self._step = 0, -1
        self.phase("init")
        self.beat()

    def phase(self, name: Phase, step: int | None = None) -> None:
        """The main thread begins `name`; `step` (from 1) stays what it was where none is given."""
        version = 2 * self._entries
        self._entries += 1
        self._step = self._step if step is None else step
        record = (self._entries, PHASES.index(name), self._step, time.monotonic())
        _RECORD.pack_into(self._memory, 0, version + 1, *record)
        _RECORD.pack_into(self._memory, 0, version + 2, *record)

    def beat(self) -> None:
        """The process runs Python."""
        _BEAT.pack_into(self._memory, _BEAT_AT, time.monotonic())

    @property
    def state(self) -> State:
        return _state(self._memory)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beat from a thread of its own for the length of a block."""
        done = threading.Event()

        def run() -> None:
            while not done.wait(BEAT_SECONDS):
                self.beat()

        thread = threading.Thread(target=run, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def patience(limits: Mapping[Phase, float]) -> timedelta:
    """After which a rank gives up waiting for the others in a collective: later than any phase of training may last.

    `limits`: of phases that have others than `LIMITS`. It is they that find a hang and name the odd rank.
    """
    longest = max(seconds for phase, seconds in {**LIMITS, **limits}.items() if phase != "run")
    return timedelta(seconds=min(longest + SLACK_SECONDS, LONGEST_SECONDS))


def read_state(path: Path) -> State | None:
    """What the rank behind `path` last told; None where it has not begun."""
    data = b""
    for _ in range(READ_ATTEMPTS):  # a rank that is stopped while it writes leaves the record odd; then it is as it is
        with suppress(FileNotFoundError):
            data = path.read_bytes()
        if len(data) == SIZE and _RECORD.unpack_from(data)[0] % 2 == 0:
            break
    return _state(data) if len(data) == SIZE and _RECORD.unpack_from(data)[0] else None


def _state(memory: mmap.mmap | bytearray | bytes) -> State:
    _, entries, phase, step, since = _RECORD.unpack_from(memory)
    (beat,) = _BEAT.unpack_from(memory, _BEAT_AT)
    return State(entries, PHASES[phase], None if step < 0 else step, since, beat)


def _mapped(path: Path) -> mmap.mmap:
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)
