"""Rewards in worker processes that can be killed. Imports no torch."""

import difflib
import random
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from dovetail import system
from dovetail.errors import ConfigError, MachineError, quoted
from dovetail.rewards.built_in import BUILT_IN
from dovetail.rewards.process import Answer, RewardProcess
from dovetail.rewards.samples import RewardInput, RewardResult, TrainingProgress, too_many_errors
from dovetail.rewards.signatures import LIMIT

START_SECONDS = 120.0
ASYNC_GRACE = 5.0  # seconds to report async calls that took too long
MAX_SECONDS = 1e6  # for system calls
CRASHES = (  # signals of the reward's own code, or of a library of it
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """What one call of a reward gets, and how many run at a time."""

    batch: str = "sample"  # samples of a call: "sample", "group" (of a prompt) or "step"
    metric: bool = False  # one number may be that of all samples of a call
    workers: int = 1
    concurrency: int = 16  # calls of an async function at a time in each worker
    columns: Seq[str] | None = None  # of the rows, if they are known


class _Running(NamedTuple):
    samples: list[int]
    deadline: float


def refuse_unknown(name: str | None, key: str) -> None:
    if name not in BUILT_IN:
        near = difflib.get_close_matches(str(name), BUILT_IN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if ":" in str(name):
            hint = f"; for a function of yours, write import: {quoted(name)} instead of name"
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"{key}{quoted(name)} is no built-in reward ({known}){hint}")


class RewardRunner:
    """Processes of one reward, replaced if they die or exceed `timeout` seconds.

    function: module:function of `directory`. address: arguments of `Judge` or `RemoteModel`.
    output: a file for what the reward prints, instead of standard error; see `log_to`.
    ConfigError if the reward cannot be loaded.
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
        limits: CallLimits | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        if function is None and address is None:
            refuse_unknown(name, "reward.name=")
        self._limits = limits or CallLimits()
        self._timeout = min(timeout, MAX_SECONDS)
        self.is_async = False  # whether calls are awaited
        self._kills_before = system.out_of_memory_kills()
        self.watch: Callable[[int, int], None] | None = None
        self.metrics: list[tuple[str, float]] = []  # that the last `score` logged
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
        self._processes = [
            RewardProcess(self._setup, self._output) for _ in range(self._limits.workers)
        ]
        for process in self._processes:
            self._await_ready(process)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self,
        samples: Seq[RewardInput],
        max_errors: float | None = None,
        groups: Seq[int] | None = None,
        progress: TrainingProgress | None = None,
    ) -> list[RewardResult]:
        """Returns a result for each sample, in order.

        max_errors: close when `too_many_errors` of this share. groups: the prompt of each sample.
        """
        results: list[RewardResult | None] = [None] * len(samples)
        waiting = self._calls(len(samples), groups)
        running: dict[RewardProcess, _Running] = {}
        idle = list(self._processes)
        message = {"trainer_state": asdict(progress or TrainingProgress())}
        self.metrics = []
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and idle:
                    process = idle.pop()
                    calls = self._next_calls(waiting)
                    given = [[vars(samples[i]) for i in call] for call in calls]
                    process.send({**message, "calls": given})
                    running[process] = _Running(
                        [i for call in calls for i in call],
                        time.monotonic() + self._seconds_of_a_message,
                    )
                    selector.register(process.answers, selectors.EVENT_READ, process)
                nearest = min(each.deadline for each in running.values())
                selector.select(max(nearest - time.monotonic(), 0.0))
                for process, (indices, deadline) in list(running.items()):
                    answer = process.answer()
                    if answer is None and process.alive and time.monotonic() < deadline:
                        continue
                    selector.unregister(process.answers)
                    del running[process]
                    found = self._results(process, answer, len(indices))
                    for index, result in zip(indices, found, strict=True):
                        results[index] = result
                    if self.watch is not None:
                        self.watch(sum(result is not None for result in results), len(results))
                    if max_errors is not None and too_many_errors(results, max_errors):
                        self.close()
                        return [result or RewardResult(None, scored=False) for result in results]
                    is_usable = answer is not None and process.alive
                    idle.append(process if is_usable else self._replace(process))
        return [result for result in results if result is not None]

    @property
    def _seconds_of_a_message(self) -> float:
        return self._timeout + ASYNC_GRACE if self.is_async else self._timeout

    def _next_calls(self, waiting: list[list[int]]) -> list[list[int]]:
        count = min(self._limits.concurrency if self.is_async else 1, len(waiting))
        return [waiting.pop() for _ in range(count)]

    def _calls(self, count: int, groups: Seq[int] | None) -> list[list[int]]:
        """The samples of each call, in a random order, so that long ones are spread."""
        by_group: dict[int, list[int]] = {}
        for index in range(count):
            key = index if self._limits.batch == "sample" else 0
            if self._limits.batch == "group" and groups is not None:
                key = groups[index]
            by_group.setdefault(key, []).append(index)
        return random.Random(0).sample(list(by_group.values()), len(by_group))

    def log_to(self, path: Path) -> None:
        """Append to `path` what the reward prints from now on."""
        self._setup["log"] = str(path.resolve())
        for process in self._processes:
            process.send({"log": self._setup["log"]})

    def close(self) -> None:
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.kill()
        self._processes.clear()

    def _results(
        self, process: RewardProcess, answer: Answer | None, count: int
    ) -> list[RewardResult]:
        if answer is not None and len(answer.results) == count:
            self.metrics += answer.metrics
            return answer.results
        if answer is not None:
            return answer.results[:1] * count
        if process.alive:
            error = f"no answer within {self._timeout:g} s {LIMIT}; the worker was killed"
            return [RewardResult(None, error)] * count
        return [self._death(process)] * count

    def _death(self, process: RewardProcess) -> RewardResult:
        number = process.signal_of_its_end()
        if number == 0:
            return RewardResult(None, "the worker process died")
        error = f"the worker process was {system.killed_by(number, self._kills_before)}"
        return RewardResult(None, error, killed=number not in CRASHES)

    def _replace(self, process: RewardProcess) -> RewardProcess:
        process.kill()
        fresh = RewardProcess(self._setup, self._output)
        self._processes[self._processes.index(process)] = fresh
        self._await_ready(fresh)
        return fresh

    def _await_ready(self, process: RewardProcess) -> None:
        """ConfigError if the reward cannot be loaded, MachineError if the system killed it."""
        deadline = time.monotonic() + START_SECONDS
        answer = None
        with selectors.DefaultSelector() as selector:
            selector.register(process.answers, selectors.EVENT_READ)
            while answer is None and process.alive and time.monotonic() < deadline:
                selector.select(max(deadline - time.monotonic(), 0.0))
                answer = process.answer()
        if answer is not None and answer.results[0].error is None:
            self.is_async = bool(answer.results[0].value)
            return
        name = self._setup["function"] or self._setup["name"] or "at an address"
        where = f"looked up from {self._setup['directory']}"
        refused = f"reward {quoted(name)} ({where}) cannot be loaded"
        death = None if answer is not None or process.alive else self._death(process)
        self.close()
        if death is not None and death.killed:
            raise MachineError(f"{refused}: {death.error}")
        cause = answer.results[0].error if answer is not None else None
        raise ConfigError(f"{refused}: {cause or 'it did not load in time or ended its process'}")
