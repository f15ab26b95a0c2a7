"""Rewards of sampled responses, computed in killable worker processes so that no reward function can stop a run.

A reward is a built-in (`reward_functions.BUILT_IN`) or a user's `module:function` that the recipe names, with either
signature of docs/contract.md, section `train` (called as `reward_worker` says). This module and the workers load no torch.
"""

import difflib
import json
import os
import random
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dovetail.data.examples import Prompt
from dovetail.errors import ConfigError, DataError, quoted
from dovetail.jsonl import as_text
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rl.reward_functions import BUILT_IN
from dovetail.rl.reward_worker import END_SECONDS
from dovetail.rollout.base import Completion

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dovetail.rl.reward_worker import main; main()"


SLOW = "where it needs longer, raise reward.timeout_seconds"


_START_SECONDS = 120.0  # a user's module may import heavy things


LONGEST = 1e6  # seconds that a reward may take; the system's calls take no more than twice as many


FIRST_SAMPLES = 8  # where all of so many fail, drawn at random, that 5 % of all fail has a chance of 4e-11


_MOST_BYTES = 1 << 20  # of an answer


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """What a reward may look at: the row's prompt (text or messages), answer and other columns, and the response."""

    completion: str
    answer: Any = None
    finish: str = "stop"  # or "length"
    prompt: str | list[dict[str, Any]] = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """`value` is None for a dropped sample: on purpose where `error` is None too (the function returned None).

    judged: False where `score` gave up before it came to the sample.
    """

    value: float | None
    error: str | None = None
    judged: bool = True


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
        self._timeout = min(timeout, LONGEST)
        self._setup = {
            "name": name,
            "function": function,
            "options": dict(options or {}),
            "directory": None if directory is None else str(Path(directory).resolve()),
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

    def score(self, samples: Sequence[RewardInput], most_errors: float | None = None) -> list[RewardResult]:
        """One result a sample, in order, whatever the reward function does to its worker.

        most_errors: give up, and close the runner, once more than this share of all samples has failed, or all of the
        first `FIRST_SAMPLES`. Samples are judged in a random order, the same for equally many.
        """
        results: list[RewardResult | None] = [None] * len(samples)
        waiting = random.Random(0).sample(range(len(samples)), len(samples))
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
                    if most_errors is not None and _hopeless(results, most_errors):
                        self.close()
                        return [result or RewardResult(None, judged=False) for result in results]
                    idle.append(worker if answer is not None and worker.alive else self._replace(worker))
        return [result for result in results if result is not None]

    def close(self) -> None:
        """End the workers; the runner is not to be used again."""
        for worker in self._workers:
            worker.ask_to_end()
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


def _hopeless(results: Sequence[RewardResult | None], most_errors: float) -> bool:
    """Whether too many samples have failed, however the others come out."""
    done = [result.error is not None for result in results if result is not None]
    return sum(done) > most_errors * len(results) or (all(done) and len(done) >= FIRST_SAMPLES)


class _Worker:
    """The keeper of one reward process, in a session of its own; both speak JSON lines."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the run's alone
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self.answers: IO[bytes] = self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self._buffer, self._asked = b"", ""
        self.alive = True
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> None:
        """A child that is already gone shows in `answer`."""
        self._asked = secrets.token_hex()
        try:
            left = json.dumps({**message, "id": self._asked}, default=as_text).encode() + b"\n"
            while left:
                left = left[os.write(self._requests.fileno(), left) :]
        except BrokenPipeError:
            self.alive = False

    def answer(self) -> Mapping[str, Any] | None:
        """The answer to the latest message, if it has come; never waits. After one of another form nothing more is read."""
        try:
            chunk = os.read(self.answers.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        self.alive = self.alive and bool(chunk)
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline and len(line) < _MOST_BYTES:
            return None
        self._buffer = rest
        answer = _parsed(line)
        if answer is not None and answer["id"] == self._asked:
            return answer
        self.alive = False
        return {"value": None, "error": f"the reward wrote into the pipe that its answers go through: {line!r:.100}"}

    def ask_to_end(self) -> None:
        """Have the keeper end itself and all that runs below it."""
        self._requests.close()

    def kill(self) -> None:
        """End the reward and everything it started, which is still there where the reward has ended by itself."""
        self.ask_to_end()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:  # the reward has stopped its keeper
            self._process.kill()
            self._process.wait()
        self.answers.close()


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    """An answer as `reward_worker` writes them; None for anything else."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match answer:
        case {"id": str(), "value": int() | float() | None, "error": str() | None}:
            return answer
    return None


MOST_REWARD_ERRORS = 0.05  # of a step's samples; above it the reward itself is taken to be wrong


class RewardTask:
    """`runner` is there on the first rank only; `name` is the reward's, for messages. Collective."""

    def __init__(self, runner: RewardRunner | None, mesh: Mesh, name: str) -> None:
        self.runner, self.mesh, self.name = runner, mesh, name

    def __call__(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        """One result a completion; `prompts[i]` is what completion i answers."""
        told: list[tuple[float | None, str | None, bool]] = []
        with agreed(self.mesh):
            if self.runner is not None:
                judged = [
                    RewardInput(completion=text, answer=p.answer, finish=c.finish, prompt=p.prompt, columns=p.columns)
                    for p, c, text in zip(prompts, completions, texts, strict=True)
                ]
                results = self.runner.score(judged, MOST_REWARD_ERRORS)
                told = [(result.value, result.error, result.judged) for result in results]
        return [RewardResult(*result) for result in of_first(told, self.mesh)]

    def close(self) -> None:
        """End the reward processes."""
        if self.runner is not None:
            self.runner.close()


def count_errors(results: Seq[RewardResult], ids: Seq[Any], where: str) -> tuple[int, str | None]:
    """How many samples an error dropped, and the first one's cause; DataError where they are too many. `ids`: of their rows."""
    failed = [(result.error, row) for result, row in zip(results, ids, strict=True) if result.error is not None]
    errors, total, judged = len(failed), len(results), sum(result.judged for result in results)
    if not failed:
        return 0, None
    cause, row = failed[0]
    if errors > MOST_REWARD_ERRORS * total:
        share = f"{errors} of {total} samples, more than {MOST_REWARD_ERRORS:.0%}"
    elif judged < total:
        share = f"all of the first {judged} of {total} samples"
    else:
        return errors, cause
    rest = "" if judged == total else " (the others were not judged)"
    raise DataError(
        f"{where}: the reward failed on {share}{rest}; first cause: {cause}, on row {row!r:.100}; fix the reward function, "
        "or the rows that it fails on"
    )
