"""A rank's phase and step in a shared file, with heartbeats from a thread. Imports no torch."""

import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Phase = Literal[
    "init", "meet", "load", "run", "push", "rollout", "reward", "score", "update", "optimizer",
    "save", "eval", "wait", "exit", "profile",
]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
# Seconds until a phase counts as hung.
# `meet`: ranks of another launcher wait for each other. `run`: score or generate.
LIMITS: Mapping[Phase, float] = {
    "init": 600.0, "meet": 120.0, "load": 1800.0, "run": float("inf"), "push": 900.0,
    "rollout": 3600.0, "reward": 1800.0, "score": 1200.0, "update": 1200.0, "optimizer": 600.0,
    "save": 1800.0, "eval": 3600.0, "wait": 1800.0, "exit": 600.0, "profile": 1800.0,
}  # fmt: skip

COLLECTIVE_SLACK = 120.0
MAX_COLLECTIVE_SECONDS = 30 * 86400.0
READ_ATTEMPTS = 5
_RECORD = struct.Struct("<qqqddq")  # a State; step -1: none; `entries` again, to detect torn reads


class State(NamedTuple):
    """Monotonic times, comparable between processes of a machine."""

    entries: int  # phases entered so far
    phase: Phase
    step: int | None  # from 1
    since: float  # of the phase
    beat: float  # when it last ran any Python

    def where(self) -> str:
        return f"phase {self.phase}" + ("" if self.step is None else f", step {self.step}")


class Progress:
    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else path.open("wb", buffering=0)
        self._lock = threading.Lock()
        self.listener: Callable[[Phase, int, int, int], None] | None = None
        self.mark: Callable[[str], AbstractContextManager[object]] = (
            nullcontext  # names a stretch of time in a profile
        )
        self.profile_wanted = False  # by a signal
        self._marked = ExitStack()  # the phase
        self._seconds = defaultdict[Phase, float](float)
        self.state = State(0, "init", None, time.monotonic(), time.monotonic())
        self._counted = self.state.since
        self.phase("init")

    @property
    def is_watched(self) -> bool:
        return self._file is not None

    def phase(self, name: Phase, step: int | None = None) -> None:
        """step: from 1; None: as before."""
        with self._lock:
            entries, _, last, _, beat = self.state
            now = self._count()
            self._write(State(entries + 1, name, last if step is None else step, now, beat))
        self._marked.close()
        self._marked.enter_context(self.mark(name))
        self.advance(0, 0)

    def want_profile(self, *_: object) -> None:
        """A signal handler."""
        self.profile_wanted = True

    def advance(self, done: int, total: int, tokens: int = 0) -> None:
        """total 0: unknown. tokens: so far in this phase."""
        if self.listener is not None:
            self.listener(self.state.phase, done, total, tokens)

    def take_seconds(self) -> Mapping[Phase, float]:
        """Returns seconds by phase since the last call."""
        with self._lock:
            self._count()
            taken = self._seconds
            self._seconds = defaultdict(float)
        return taken

    def _count(self) -> float:
        now = time.monotonic()
        self._seconds[self.state.phase] += now - self._counted
        self._counted = now
        return now

    def beat(self) -> None:
        with self._lock:
            self._write(self.state._replace(beat=time.monotonic()))

    def _write(self, state: State) -> None:
        self.state = state
        if self._file is not None:
            step = -1 if state.step is None else state.step
            record = (
                state.entries,
                PHASES.index(state.phase),
                step,
                state.since,
                state.beat,
                state.entries,
            )
            os.pwrite(self._file.fileno(), _RECORD.pack(*record), 0)


@contextmanager
def calling_every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Calls `function` every so many seconds, from a thread."""
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
    """Longer than any phase, as phase limits name the hung rank."""
    longest = max(seconds for phase, seconds in {**LIMITS, **limits}.items() if phase != "run")
    return timedelta(seconds=min(longest + COLLECTIVE_SLACK, MAX_COLLECTIVE_SECONDS))


def read_state(path: Path) -> State | None:
    """None: not written yet."""
    for _ in range(READ_ATTEMPTS):
        with suppress(FileNotFoundError, struct.error):
            entries, phase, step, since, beat, same = _RECORD.unpack(path.read_bytes())
            if entries == same:
                return State(entries, PHASES[phase], None if step < 0 else step, since, beat)
    return None
