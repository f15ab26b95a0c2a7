"""Rewards of sampled responses, computed in killable worker processes so that no reward function can stop a run.

A reward is a built-in (`reward_functions.BUILT_IN`) or a user's `module:function` that the recipe names, with either
signature of docs/contract.md, section `train` (called as `reward_worker` says). This module and the workers load no torch.
"""

import contextlib
import difflib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dovetail.errors import ConfigError, quoted
from dovetail.metrics import as_text
from dovetail.rl.reward_functions import BUILT_IN

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dovetail.rl.reward_worker import main; main()"
SLOW = "where it needs longer, raise reward.timeout_seconds"
_START_SECONDS = 120.0  # a user's module may import heavy things
LONGEST = 1e6  # seconds that a reward may take; the system's calls take no more than twice as many


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a reward may look at: the row's prompt (text or messages), answer and other columns, and the response."""

    completion: str
    answer: Any = None
    finish: str = "stop"  # or "length"
    prompt: str | list[dict[str, Any]] = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """`value` is None for a dropped sample: on purpose where `error` is None too (the function returned None)."""

    value: float | None
    error: str | None = None


def count_errors(results: Sequence[RewardResult]) -> tuple[int, str | None]:
    """How many samples an error dropped, and the first one's cause."""
    errors = [result.error for result in results if result.error is not None]
    return len(errors), errors[0] if errors else None


class RewardRunner:
    """A pool of worker processes that score samples with one reward.

    Each sample has `timeout` seconds of its own, `LONGEST` at most; a worker that does not answer in time, or dies, is
    replaced. The constructor raises ConfigError where the reward cannot be loaded. `options` go to the function by keyword.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        function: str | None = None,
        options: Mapping[str, Any] | None = None,
        directory: Path | str | None = None,
        timeout: float = 10.0,
        workers: int = 1,
    ) -> None:
        if (name is None) == (function is None):
            raise ConfigError(
                f"reward: give either name or import, not name={quoted(name)} with import={quoted(function)}"
            )
        if name is not None and name not in BUILT_IN:
            near = difflib.get_close_matches(name, BUILT_IN, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"reward.name={quoted(name)} is no built-in reward ({', '.join(BUILT_IN)}){hint}")
        if function is not None and not all(function.partition(":")):
            raise ConfigError(f"reward.import={quoted(function)} is not of the form module:function")
        timeout = self._timeout = min(timeout, LONGEST)
        self._setup = {
            "name": name,
            "function": function,
            "options": dict(options or {}),
            "directory": None if directory is None else str(Path(directory).resolve()),
            "timeout": timeout,
        }
        self._workers = [_Worker(self._setup) for _ in range(max(workers, 1))]
        for worker in self._workers:
            self._await_ready(worker)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, samples: Sequence[Judged]) -> list[RewardResult]:
        """One result a sample, in order, whatever the reward function does to its worker."""
        results: list[RewardResult | None] = [None] * len(samples)
        waiting = list(range(len(samples)))[::-1]
        running: dict[_Worker, tuple[int, float]] = {}
        idle = list(self._workers)
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and idle:
                    worker, index = idle.pop(), waiting.pop()
                    worker.send(vars(samples[index]))
                    running[worker] = (index, time.monotonic() + self._timeout)
                    selector.register(worker.answers, selectors.EVENT_READ, worker)
                nearest = min(deadline for _, deadline in running.values())
                selector.select(max(nearest - time.monotonic(), 0.0))
                for worker, (index, deadline) in list(running.items()):
                    answer = worker.answer()
                    if answer is None and worker.alive and time.monotonic() < deadline:
                        continue
                    selector.unregister(worker.answers)
                    del running[worker]
                    results[index] = self._result(worker, answer)
                    idle.append(worker if answer is not None else self._replace(worker))
        return [result for result in results if result is not None]

    def close(self) -> None:
        """End the workers; the runner is not to be used again."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _result(self, worker: "_Worker", answer: Mapping[str, Any] | None) -> RewardResult:
        if answer is not None:
            return RewardResult(answer["value"], answer["error"])
        if worker.alive:
            return RewardResult(None, f"no answer within {self._timeout:g} s; the worker was killed; {SLOW}")
        return RewardResult(None, "the worker process died")

    def _replace(self, worker: "_Worker") -> "_Worker":
        worker.kill()
        fresh = _Worker(self._setup)
        self._workers[self._workers.index(worker)] = fresh
        self._await_ready(fresh)
        return fresh

    def _await_ready(self, worker: "_Worker") -> None:
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(worker.answers, selectors.EVENT_READ)
            while (answer := worker.answer()) is None and worker.alive and time.monotonic() < deadline:
                selector.select(max(deadline - time.monotonic(), 0.0))
        cause = "it did not load in time or ended its process" if answer is None else answer["error"]
        if cause is not None:
            self.close()
            name = self._setup["function"] or self._setup["name"]
            raise ConfigError(
                f"reward {quoted(name)} (looked up from {self._setup['directory']}) cannot be loaded: {cause}"
            )


class _Worker:
    """One child process in a session of its own, spoken to in JSON lines."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that what a reward function starts dies with it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self.answers: IO[bytes] = self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self._buffer = b""
        self.alive = True
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> None:
        """A child that is already gone shows in `answer`."""
        try:
            left = json.dumps(message, default=as_text).encode() + b"\n"
            while left:
                left = left[os.write(self._requests.fileno(), left) :]
        except BrokenPipeError:
            self.alive = False

    def answer(self) -> Mapping[str, Any] | None:
        """The next whole line, if it has come; never waits."""
        try:
            chunk = os.read(self.answers.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        self.alive = self.alive and bool(chunk)
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the child and everything it started, which is still there where the child has ended by itself."""
        if self._process.returncode is None:  # until `wait` its number is nobody else's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self.answers.close()
