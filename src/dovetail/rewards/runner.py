"""Rewards in worker processes that can be killed. Imports no torch."""

import difflib
import json
import os
import random
import secrets
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dovetail import system
from dovetail.errors import ConfigError, DataError, MachineError, quoted
from dovetail.jsonl import as_text
from dovetail.launch.process import start_worker
from dovetail.rewards.built_in import BUILT_IN
from dovetail.rewards.worker import END_SECONDS, KILLED, LONGER

_START_SECONDS = 120.0
_MOST_BYTES = 1 << 20
_MOST_BYTES_EACH = 1 << 12  # of an answer, and for each sample
_ASYNC_GRACE = 5.0  # seconds to report async calls that took too long
LONGEST = 1e6  # seconds, for system calls
FIRST_SAMPLES = 8
MOST_REWARD_ERRORS = 0.05  # of the last `WINDOW` samples, or of a step with more
WINDOW = 64
OWN_SIGNALS = (  # of a crash in the reward's own code, or a library of it
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    completion: str
    answer: Any = None
    finish: str = "stop"  # or "length"
    prompt: str | list[dict[str, Any]] = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    value: float | None  # None: dropped
    error: str | None = None
    scored: bool = True  # False if `score` gave up before
    parts: Mapping[str, float | None] = field(
        default_factory=dict
    )  # terms of a sum, without weights
    killed: bool = False  # the system ended its process


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    batch: str = "sample"  # samples of a call: "sample", "group" (of a prompt) or "step"
    metric: bool = False  # one number may be that of all samples of a call
    workers: int = 1
    concurrency: int = 16  # calls of an async function at a time in each worker
    columns: Seq[str] | None = None  # of the rows, if they are known


def refuse_unknown(name: str | None, key: str) -> None:
    if name not in BUILT_IN:
        near = difflib.get_close_matches(str(name), BUILT_IN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if ":" in str(name):
            hint = f"; for a function of yours, write import: {quoted(name)} instead of name"
        raise ConfigError(
            f"{key}{quoted(name)} is no built-in reward ({', '.join(BUILT_IN)}){hint}"
        )


class RewardRunner:
    """Workers of one reward, replaced if they die or exceed `timeout` seconds. ConfigError if it cannot be loaded.

    function: module:function of `directory`. address: arguments of `Judge` or `RemoteModel`.
    output: a file for what workers print, instead of standard error; see `log_to`.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        function: str | None = None,
        address: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        directory: Path | str | None = None,
        timeout: float = 10.0,
        limits: "CallLimits | None" = None,
        output: IO[bytes] | None = None,
    ) -> None:
        if function is None and address is None:
            refuse_unknown(name, "reward.name=")
        self._limits = limits or CallLimits()
        self._timeout = min(timeout, LONGEST)
        self._calls_at_a_time = 1
        self.is_async = False  # whether calls are awaited
        self._kills_before = system.out_of_memory_kills()
        self.watch: Callable[[int, int], None] | None = None
        self._setup = {
            "name": name,
            "function": function,
            "address": address,
            "options": dict(options or {}),
            "directory": None if directory is None else str(Path(directory).resolve()),
            "timeout": self._timeout,
            "metric": self._limits.metric,
            "columns": self._limits.columns,
            "log": None,
        }
        self._output = output
        self._workers = [_Worker(self._setup, self._output) for _ in range(self._limits.workers)]
        for worker in self._workers:
            self._await_ready(worker)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self,
        samples: Seq[RewardInput],
        most_errors: float | None = None,
        groups: Seq[int] | None = None,
    ) -> list[RewardResult]:
        """In order. most_errors: close after a larger share, or if all of the first `FIRST_SAMPLES` failed.

        The share is of the samples, or of `WINDOW` where there are fewer.
        """
        results: list[RewardResult | None] = [None] * len(samples)
        waiting = self._calls(len(samples), groups)
        running: dict[_Worker, tuple[list[int], float]] = {}
        idle = list(self._workers)
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and idle:
                    worker = idle.pop()
                    calls = [waiting.pop() for _ in range(min(self._calls_at_a_time, len(waiting)))]
                    worker.send({"calls": [[vars(samples[i]) for i in call] for call in calls]})
                    longest = self._timeout + (_ASYNC_GRACE if self._calls_at_a_time > 1 else 0.0)
                    running[worker] = (
                        [i for call in calls for i in call],
                        time.monotonic() + longest,
                    )
                    selector.register(worker.answers, selectors.EVENT_READ, worker)
                nearest = min(deadline for _, deadline in running.values())
                selector.select(max(nearest - time.monotonic(), 0.0))
                for worker, (indices, deadline) in list(running.items()):
                    answer = worker.answer()
                    if answer is None and worker.alive and time.monotonic() < deadline:
                        continue
                    selector.unregister(worker.answers)
                    del running[worker]
                    for index, result in zip(
                        indices, self._results(worker, answer, len(indices)), strict=True
                    ):
                        results[index] = result
                    if self.watch is not None:
                        self.watch(sum(result is not None for result in results), len(results))
                    if most_errors is not None and _hopeless(results, most_errors):
                        self.close()
                        return [result or RewardResult(None, scored=False) for result in results]
                    idle.append(
                        worker if answer is not None and worker.alive else self._replace(worker)
                    )
        return [result for result in results if result is not None]

    def _calls(self, count: int, groups: Seq[int] | None) -> list[list[int]]:
        by_group: dict[int, list[int]] = {}
        for index in range(count):
            key = {"sample": index, "step": 0, "group": groups[index] if groups is not None else 0}[
                self._limits.batch
            ]
            by_group.setdefault(key, []).append(index)
        return random.Random(0).sample(list(by_group.values()), len(by_group))

    def log_to(self, path: Path) -> None:
        """Append to `path` what workers print from now on."""
        self._setup["log"] = str(path.resolve())
        for worker in self._workers:
            worker.send({"log": self._setup["log"]})

    def close(self) -> None:
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _results(
        self, worker: "_Worker", answer: "list[RewardResult] | None", count: int
    ) -> "list[RewardResult]":
        if answer is not None:
            return answer if len(answer) == count else [RewardResult(None, answer[0].error)] * count
        if worker.alive:
            error = f"no answer within {self._timeout:g} s; the worker was killed; {LONGER}"
            return [RewardResult(None, error)] * count
        return [self._death(worker)] * count

    def _death(self, worker: "_Worker") -> RewardResult:
        number = worker.signal_of_its_end()
        if number == 0:
            return RewardResult(None, "the worker process died")
        error = f"the worker process was {system.killed_by(number, self._kills_before)}"
        return RewardResult(None, error, killed=number not in OWN_SIGNALS)

    def _replace(self, worker: "_Worker") -> "_Worker":
        worker.kill()
        fresh = self._workers[self._workers.index(worker)] = _Worker(self._setup, self._output)
        self._await_ready(fresh)
        return fresh

    def _await_ready(self, worker: "_Worker") -> None:
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(worker.answers, selectors.EVENT_READ)
            while (
                (answer := worker.answer()) is None and worker.alive and time.monotonic() < deadline
            ):
                selector.select(max(deadline - time.monotonic(), 0.0))
        cause = (
            "it did not load in time or ended its process" if answer is None else answer[0].error
        )
        death = None if answer is not None or worker.alive else self._death(worker)
        if answer is not None and answer[0].value:
            self._calls_at_a_time = self._limits.concurrency
            self.is_async = True
        if cause is not None:
            self.close()
            name = self._setup["function"] or self._setup["name"] or "at an address"
            where = f"looked up from {self._setup['directory']}"
            if death is not None and death.killed:
                raise MachineError(
                    f"reward {quoted(name)} ({where}) cannot be loaded: {death.error}"
                )
            raise ConfigError(f"reward {quoted(name)} ({where}) cannot be loaded: {cause}")


def _hopeless(results: Seq[RewardResult | None], most_errors: float) -> bool:
    failed = [result.error is not None for result in results if result is not None]
    most = most_errors * max(len(results), WINDOW)
    return sum(failed) > most or (all(failed) and len(failed) >= FIRST_SAMPLES)


class _Worker:
    """The keeper of a reward process; messages are JSON lines."""

    def __init__(self, setup: Mapping[str, Any], output: IO[bytes] | None) -> None:
        files = [] if output is None else [output.fileno()]
        self._process = start_worker("dovetail.rewards.worker", *map(str, files), files=files)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        self.answers = self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self._buffer = b""
        self._request_id = ""
        self.alive = True
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> None:
        self._request_id = secrets.token_hex()
        self._most_bytes = _MOST_BYTES + _MOST_BYTES_EACH * sum(map(len, message.get("calls", ())))
        try:
            left = json.dumps({**message, "id": self._request_id}, default=as_text).encode() + b"\n"
            while left:
                left = left[os.write(self._requests.fileno(), left) :]
        except BrokenPipeError:
            self.alive = False

    def answer(self) -> list[RewardResult] | None:
        """The answer to the last message, or None; does not wait."""
        try:
            chunk = os.read(self.answers.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        self.alive = self.alive and bool(chunk)
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline and len(line) < self._most_bytes:
            return None
        self._buffer = rest
        answer = _parsed(line, self._request_id)
        if answer is not None:
            return answer
        self.alive = False
        return [
            RewardResult(
                None, f"the reward wrote into the pipe that its answers go through: {line!r:.100}"
            )
        ]

    def ask_to_end(self) -> None:
        self._requests.close()

    def signal_of_its_end(self) -> int:
        """Returns the signal that killed the reward or its keeper, once their pipe is closed; 0: none."""
        try:
            code = self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            return 0
        return -code if code < 0 else max(code - KILLED, 0)

    def kill(self) -> None:
        self.ask_to_end()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:  # the reward has stopped its keeper
            self._process.kill()
            self._process.wait()
        self.answers.close()


def _parsed(line: bytes, request_id: str) -> list[RewardResult] | None:
    try:
        answer = json.loads(line)
        known = answer["results"] if answer["id"] == request_id else None
        return (
            None
            if known is None
            else [RewardResult(each["value"], each["error"]) for each in known]
        )
    except (ValueError, RecursionError, LookupError, TypeError):
        return None


class RecentFailures:
    """Failures among the last `WINDOW` samples of a run."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def count(
        self, results: Seq[RewardResult], ids: Seq[Any], where: str
    ) -> tuple[int, str | None]:
        """Returns the failed samples of a step and the first cause.

        Raises if too many failed: MachineError if the first one's process was killed, else DataError.
        """
        failed = [result.error is not None for result in results]
        self._last.extend(failed)
        total = len(results)
        scored = sum(result.scored for result in results)
        if not any(failed):
            return 0, None
        first = failed.index(True)
        cause = results[first].error
        counted = failed if total > WINDOW else list(self._last)
        errors = sum(counted)
        if errors > MOST_REWARD_ERRORS * max(total, WINDOW):
            limit = f"more than {MOST_REWARD_ERRORS:.0%} of {max(total, WINDOW)}"
            share = f"{errors} of the last {len(counted)} samples, {limit}"
        elif scored < total:
            share = f"all of the first {scored} of {total} samples"
        else:
            return sum(failed), cause
        rest = "" if scored == total else " (the others were not scored)"
        what = f"{where}: the reward failed on {share}{rest}; first cause: {cause}, on row {ids[first]!r:.100}"
        if results[first].killed:
            raise MachineError(what)
        raise DataError(f"{what}; fix the reward function, or the rows that it fails on")
