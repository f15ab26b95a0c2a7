"""Keeps engines fed with the groups that the pool admits, saves finished ones, and hands whole steps to the trainer."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from dovetail.errors import MachineError
from dovetail.rollout.journal import Answer, FinishedGroup, Journal
from dovetail.rollout.pool import Pool

Done = tuple[int, "Future[Answer]"]
Submit = Callable[[Sequence[tuple[int, int]]], "Sequence[Future[Answer]]"]
Watch = Callable[[int, int, int], None]  # samples of the step that are complete, of all; tokens, unknown


class Feed:
    """submit: begin samples (group, number) on engines. A thread saves groups; all methods are of the trainer's thread.

    keeps: groups that were trained stay saved until `forget`, for a run that goes back to a checkpoint.
    """

    def __init__(self, pool: Pool, journal: Journal, submit: Submit, *, keeps: bool = True) -> None:
        self.pool, self.journal, self.submit, self.keeps = pool, journal, submit, keeps
        self._changed = threading.Condition()  # guards the pool and what follows
        self._running: dict[int, list[Answer]] = {}
        self._finished: dict[int, FinishedGroup] = {}
        self._error: BaseException | None = None
        self.watch: Watch | None = None
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        threading.Thread(target=self._save_finished, name="feed", daemon=True).start()

    def resume(self, step: int, *, repeats: bool = True) -> list[str]:
        """Go on after a checkpoint of `step`. Returns the problems of finished groups that run again.

        repeats: the steps after the checkpoint come out as they did, so that their versions are the same policies again;
        else groups with tokens of these are lost.
        """
        first = step * self.pool.groups_per_step
        saved, problems = self.journal.load(first)
        ages = {number: group.ages for number, group in saved.items()}
        known = {number: age for number, age in ages.items() if repeats or age[1] <= step}
        kept = self.pool.restore(step, known)
        self._finished = {number: saved[number] for number in kept}
        self.journal.drop(first, kept)  # a later start must not meet them
        if lost := len(saved) - len(kept):
            problems.append(f"{lost} groups of {self.journal.path} have tokens of policies that this run does not have")
        return problems

    def pushed(self, version: int) -> None:
        """All engines that sample hold `version`: begin what the pool admits."""
        with self._changed:
            self.pool.pushed(version)
            admitted = self.pool.admit()
            self._running |= {group: [] for group in admitted}
            samples = [(group, sample) for group in admitted for sample in range(self.pool.samples)]
            for (group, _), future in zip(samples, self.submit(samples), strict=True):
                future.add_done_callback(partial(self._hand_over, group))

    def take(self) -> list[FinishedGroup]:
        """Begin a step: its groups, once they are finished. Raises what an engine raised.

        MachineError if an engine sampled with a version that it should not hold.
        """
        with self._changed:
            step, first = self.pool.step, self.pool.first
            while (chosen := self.pool.take()) is None:
                if self._error is not None:
                    raise self._error
                self._show()
                self._changed.wait()
            groups = [self._finished.pop(number) for number in chosen]
        for group in groups:
            oldest, newest = group.ages
            if not step - self.pool.max_lag <= oldest <= newest <= step:
                raise MachineError(
                    f"step {step + 1}: group {group.id} has tokens of versions {oldest} to {newest}; expected "
                    f"{max(0, step - self.pool.max_lag)} to {step}: an engine sampled with weights that it should not hold"
                )
        if not self.keeps:
            self.journal.forget(first)
        return groups

    def counts(self) -> dict[str, int]:
        """Groups of later steps: finished, and running or waiting for an engine."""
        with self._changed:
            finished = sum(group.ready for group in self.pool.alive.values())
            return {"pool_finished": finished, "pool_running": len(self.pool.alive) - finished}

    def forget(self, step: int) -> None:
        """Groups of the steps before."""
        self.journal.forget(step * self.pool.groups_per_step)

    def _show(self) -> None:
        if self.watch is not None:
            groups = range(self.pool.first, self.pool.first + self.pool.groups_per_step)
            left = sum(self.pool.alive[group].left for group in groups)
            total = len(groups) * self.pool.samples
            self.watch(total - left, total, 0)

    def close(self) -> None:
        self._done.put(None)

    def _hand_over(self, group: int, future: "Future[Answer]") -> None:
        self._done.put((group, future))

    def _save_finished(self) -> None:
        while (done := self._done.get()) is not None:
            number, future = done
            if not future.cancelled():
                with ExitStack() as stack:
                    stack.push(self._keep_error)
                    self._add(number, future.result())

    def _keep_error(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        """For `take`: the first one."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()
        return True

    def _add(self, number: int, answer: Answer) -> None:
        with self._changed:
            self._running[number].append(answer)
            self._changed.notify()
            if not self.pool.finish(number):
                return
            answers = self._running.pop(number)
        group = FinishedGroup(number, tuple(sorted(answers, key=lambda each: each.sample)))
        self.journal.save(group)
        with self._changed:
            self._finished[number] = group
            self.pool.ready(number)
            self._changed.notify()
