"""Rewards in worker processes that can be killed, so that no reward function stops a run. Loads no torch."""

import contextlib
import difflib
import json
import os
import random
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from dovetail.errors import ConfigError, DataError, quoted
from dovetail.jsonl import as_text
from dovetail.launch.process import start_worker
from dovetail.rl.reward_functions import BUILT_IN
from dovetail.rl.reward_worker import END_SECONDS

_START_SECONDS = 120.0  # a user's module may import large packages
_MOST_BYTES = 1 << 20  # of an answer
LONGEST = 1e6  # seconds; system calls take at most about twice as many
FIRST_SAMPLES = 8  # all of them fail with probability 4e-11 if 5 % of a step do
MOST_REWARD_ERRORS = 0.05  # of a step's samples


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """What a reward may read."""

    completion: str
    answer: Any = None
    finish: str = "stop"  # or "length"
    prompt: str | list[dict[str, Any]] = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """value: None: dropped. scored: False if `score` gave up before this sample."""

    value: float | None
    error: str | None = None
    scored: bool = True


class RewardRunner:
    """Workers for a built-in reward or a "module:function" in `directory`; ConfigError if it cannot be loaded.

    A worker that dies, or takes longer than `timeout` seconds, is replaced.
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
        if function is None and name not in BUILT_IN:
            hint = "".join(f"; did you mean {near!r}?" for near in difflib.get_close_matches(str(name), BUILT_IN, n=1))
            raise ConfigError(f"reward.name={quoted(name)} is no built-in reward ({', '.join(BUILT_IN)}){hint}")
        self._timeout = min(timeout, LONGEST)
        self._setup = {
            "name": name,
            "function": function,
            "options": dict(options or {}),
            "directory": None if directory is None else str(Path(directory).resolve()),
        }
        self._workers = [_Worker(self._setup) for _ in range(workers)]
        for worker in self._workers:
            self._await_ready(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, samples: Seq[RewardInput], most_errors: float | None = None) -> list[RewardResult]:
        """One result a sample, in order; scored in a random order that depends on the count.

        most_errors: give up and close when more than this share, or all of the first `FIRST_SAMPLES`, have failed.
        """
        results: list[RewardResult | None] = [None] * len(samples)
        waiting = random.Random(0).sample(range(len(samples)), len(samples))
        running: dict[_Worker, int] = {}
        idle = list(self._workers)
        while waiting or running:
            while waiting and idle:
                worker, index = idle.pop(), waiting.pop()
                worker.send(vars(samples[index]), self._timeout)
                running[worker] = index
            for worker, result in _next_results(list(running)):
                results[running.pop(worker)] = result
                if most_errors is not None and _hopeless(results, most_errors):
                    self.close()
                    return [result or RewardResult(None, scored=False) for result in results]
                idle.append(worker if worker.alive else self._replace(worker))
        return [result for result in results if result is not None]

    def close(self) -> None:
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _replace(self, worker: "_Worker") -> "_Worker":
        worker.kill()
        fresh = _Worker(self._setup)
        self._workers[self._workers.index(worker)] = fresh
        self._await_ready(fresh)
        return fresh

    def _await_ready(self, worker: "_Worker") -> None:
        while not (results := _next_results([worker])):
            pass
        cause = results[0][1].error
        if cause is not None:
            self.close()
            name = self._setup["function"] or self._setup["name"]
            raise ConfigError(
                f"reward {quoted(name)} (looked up from {self._setup['directory']}) cannot be loaded: {cause}"
            )


def _next_results(workers: "list[_Worker]") -> "list[tuple[_Worker, RewardResult]]":
    """Those of workers that have one, after waiting for an answer or a deadline."""
    nearest = min(worker.deadline for worker in workers)
    wait([worker.answers.fileno() for worker in workers], max(nearest - time.monotonic(), 0.0))
    return [(worker, result) for worker in workers if (result := worker.result()) is not None]


def _hopeless(results: Seq[RewardResult | None], most_errors: float) -> bool:
    failed = [result.error is not None for result in results if result is not None]
    return sum(failed) > most_errors * len(results) or (all(failed) and len(failed) >= FIRST_SAMPLES)


class _Worker:
    """The keeper of a reward process; messages are JSON lines. Without `alive` it is to be replaced."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._process = start_worker("dovetail.rl.reward_worker")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self.answers = self._process.stdin, self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self._buffer, self._request_id = b"", ""
        self.alive = True
        self.send(setup, _START_SECONDS)

    def send(self, message: Mapping[str, Any], seconds: float) -> None:
        self._request_id, self._seconds = secrets.token_hex(), seconds
        try:
            left = json.dumps({**message, "id": self._request_id}, default=as_text).encode() + b"\n"
            while left:
                left = left[os.write(self._requests.fileno(), left) :]
        except BrokenPipeError:
            self.alive = False
        self.deadline = time.monotonic() + seconds

    def result(self) -> RewardResult | None:
        """Of the last message; None: it may still come. Output that is no answer is an error."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self.answers.fileno(), 1 << 16)
            self.alive = self.alive and bool(chunk)
            self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if newline or len(line) >= _MOST_BYTES:
            self._buffer = rest
            answer = _parsed(line)
            if answer is not None and answer["id"] == self._request_id:
                return RewardResult(answer["value"], answer["error"])
            error = f"the reward wrote into the pipe that its answers go through: {line!r:.100}"
        elif not self.alive:
            error = "the worker process died"
        elif time.monotonic() < self.deadline:
            return None
        else:
            remedy = "where it needs longer, raise reward.timeout_seconds"
            error = f"no answer within {self._seconds:g} s; the worker was killed; {remedy}"
        self.alive = False
        return RewardResult(None, error)

    def ask_to_end(self) -> None:
        self._requests.close()

    def kill(self) -> None:
        self.ask_to_end()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:  # the reward has stopped its keeper
            self._process.kill()
            self._process.wait()
        self.answers.close()


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match answer:
        case {"id": str(), "value": int() | float() | None, "error": str() | None}:
            return answer
    return None


def count_errors(results: Seq[RewardResult], ids: Seq[Any], where: str) -> tuple[int, str | None]:
    """Failed samples and the first cause; DataError if they are too many."""
    failed = [(result.error, row) for result, row in zip(results, ids, strict=True) if result.error is not None]
    errors, total, scored = len(failed), len(results), sum(result.scored for result in results)
    if not failed:
        return 0, None
    cause, row = failed[0]
    if errors > MOST_REWARD_ERRORS * total:
        share = f"{errors} of {total} samples, more than {MOST_REWARD_ERRORS:.0%}"
    elif scored < total:
        share = f"all of the first {scored} of {total} samples"
    else:
        return errors, cause
    rest = "" if scored == total else " (the others were not scored)"
    raise DataError(
        f"{where}: the reward failed on {share}{rest}; first cause: {cause}, on row {row!r:.100}; fix the reward function, "
        "or the rows that it fails on"
    )
