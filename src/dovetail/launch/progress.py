"""A rank's phase and step in a small shared file, read by its supervisor. Imports no torch.

The main thread enters phases; heartbeats come from another, even while a collective hangs.
"""

import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Phase = Literal[
    "init", "load", "run", "push", "rollout", "reward", "score", "update", "optimizer", "save", "eval", "exit"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Seconds until a phase counts as hung; `run` is the whole of a score or generate.
LIMITS: Mapping[Phase, float] = {
    "init": 600.0, "load": 1800.0, "run": float("inf"), "push": 900.0, "rollout": 3600.0, "reward": 1800.0,
    "score": 1200.0, "update": 1200.0, "optimizer": 600.0, "save": 1800.0, "eval": 3600.0, "exit": 600.0,
}  # fmt: skip

COLLECTIVE_SLACK, MAX_COLLECTIVE_SECONDS = 120.0, 30 * 86400.0
READ_ATTEMPTS = 5
_RECORD = struct.Struct("<QQqqd")  # version (odd during a write), entries, phase, step (-1: none), since
_BEAT, _BEAT_OFFSET = struct.Struct("<d"), 64
SIZE = 128


class State(NamedTuple):
    """Times are of the monotonic clock, the same in all processes of a machine."""

    entries: int  # phases entered so far
    phase: Phase
    step: int | None  # from 1
    since: float  # of the phase
    beat: float  # when it last ran any Python

    def where(self) -> str:
        return f"phase {self.phase}" + ("" if self.step is None else f", step {self.step}")


class Progress:
    """The writing side; without a path, of no file."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE)
        if path is not None:
            path.write_bytes(bytes(SIZE))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SIZE)
        self._entries, self._step = 0, -1
        self.phase("init")
        self.beat()

    def phase(self, name: Phase, step: int | None = None) -> None:
        """The main thread begins a phase. step: from 1; None: as before."""
        version = 2 * self._entries
        self._entries += 1
        self._step = self._step if step is None else step
        record = (self._entries, PHASES.index(name), self._step, time.monotonic())
        _RECORD.pack_into(self._memory, 0, version + 1, *record)
        _RECORD.pack_into(self._memory, 0, version + 2, *record)

    def beat(self) -> None:
        _BEAT.pack_into(self._memory, _BEAT_OFFSET, time.monotonic())

    @property
    def state(self) -> State:
        return _state(self._memory)


@contextmanager
def calling_every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function from a thread during the block."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(seconds):
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def collective_timeout(limits: Mapping[Phase, float]) -> timedelta:
    """Longer than any phase: phase limits name the hung rank. limits: those that differ from `LIMITS`."""
    longest = max(seconds for phase, seconds in {**LIMITS, **limits}.items() if phase != "run")
    return timedelta(seconds=min(longest + COLLECTIVE_SLACK, MAX_COLLECTIVE_SECONDS))


def read_state(path: Path) -> State | None:
    """None before the rank's first write."""
    data = bytes(SIZE)
    for _ in range(READ_ATTEMPTS):  # a rank stopped in the middle of a write leaves the version odd
        with suppress(FileNotFoundError):
            data = path.read_bytes().ljust(SIZE, b"\0")
        if _RECORD.unpack_from(data)[0] % 2 == 0:
            break
    return _state(data) if _RECORD.unpack_from(data)[0] else None


def _state(memory: mmap.mmap | bytearray | bytes) -> State:
    _, entries, phase, step, since = _RECORD.unpack_from(memory)
    (beat,) = _BEAT.unpack_from(memory, _BEAT_OFFSET)
    return State(entries, PHASES[phase], None if step < 0 else step, since, beat)
