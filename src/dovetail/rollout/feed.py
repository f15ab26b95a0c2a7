"""Keeps engines fed with the groups that the pool admits, saves finished ones, and hands whole batches to the trainer.

It holds no thread: its owner calls `turn`. docs/adr/025-the-asynchronous-loop.md says who does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dovetail.errors import MachineError
from dovetail.rollout.journal import Answer, FinishedGroup, Journal
from dovetail.rollout.pool import Pool


@dataclass(frozen=True)
class Request:
    """One sample of a group. (step, row) are the keys of its noise, those of a synchronous run."""

    group: int
    sample: int
    step: int
    row: int


class Fleet(Protocol):
    """Engines that take requests in order, at least as many as they can run, and know what each asks for."""

    def submit(self, request: Request) -> None: ...

    def collect(self, seconds: float) -> list[tuple[Request, Answer]]:
        """Complete samples; waits at most so long for the first."""
        ...


class Feed:
    """reward: of all answers of a group, without those that have none. keep: whether a finished group trains."""

    def __init__(
        self,
        pool: Pool,
        journal: Journal,
        fleet: Fleet,
        reward: Callable[[int, Sequence[Answer]], Sequence[Answer]],
        keep: Callable[[FinishedGroup], bool] = lambda group: bool(group.answers),
    ) -> None:
        self.pool, self.journal, self.fleet, self.reward, self.keep = pool, journal, fleet, reward, keep
        self._running: dict[int, list[Answer]] = {}
        self._finished: dict[int, FinishedGroup] = {}

    def resume(self, step: int, cursor: int) -> list[str]:
        """Go on after a checkpoint. Returns the problems of files of finished groups, which run again."""
        saved, problems = self.journal.load(cursor)
        trains = {number: group.ages for number, group in saved.items() if self.keep(group)}
        kept = self.pool.restore(step, cursor, trains, saved.keys() - trains.keys())
        self._finished = {number: saved[number] for number in kept}
        return problems

    def turn(self, seconds: float = 0.0) -> None:
        """Submit what the pool admits, and take what is complete."""
        for group in self.pool.admit():
            self._running[group] = []
            step, row = divmod(group, self.pool.groups_per_step)
            for sample in range(self.pool.samples):
                self.fleet.submit(Request(group, sample, step, row))
        for request, answer in self.fleet.collect(seconds):
            self._running[request.group].append(answer)
            if self.pool.finish(request.group):
                self._complete(request.group)

    def take(self) -> list[FinishedGroup] | None:
        """Begin a step: its groups. None: it has to wait. MachineError if an engine used a version that it should not have."""
        step = self.pool.step
        if (chosen := self.pool.take()) is None:
            return None
        groups = [self._finished.pop(number) for number in chosen]
        for group in groups:
            oldest, newest = group.ages
            if not step - self.pool.max_lag <= oldest <= newest <= step:
                raise MachineError(
                    f"step {step + 1}: group {group.id} has tokens of versions {oldest} to {newest}; expected "
                    f"{max(0, step - self.pool.max_lag)} to {step}: an engine sampled with weights that it should not hold"
                )
        return groups

    def _complete(self, number: int) -> None:
        answers = sorted(self._running.pop(number), key=lambda answer: answer.sample)
        group = FinishedGroup(number, tuple(self.reward(number, answers)))
        self.journal.save(group)
        if self.keep(group):
            self._finished[number] = group
            self.pool.ready(number)
        else:
            self.pool.drop(number)
