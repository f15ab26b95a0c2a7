"""Keeps engines fed with the groups that the pool admits, saves finished ones, and hands whole steps to the trainer."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from dovetail.errors import MachineError
from dovetail.rollout.journal import Answer, FinishedGroup, Journal
from dovetail.rollout.pool import Pool

Done = tuple[int, "Future[Answer]"]
Watch = Callable[[int, int, int], None]  # samples of the step that are complete, of all; tokens, unknown


class Feed:
    """submit: begin a sample (group, number) on an engine. A thread saves groups; all methods are of the trainer's thread."""

    def __init__(self, pool: Pool, journal: Journal, submit: Callable[[int, int], "Future[Answer]"]) -> None:
        self.pool, self.journal, self.submit = pool, journal, submit
        self._changed = threading.Condition()  # guards the pool and what follows
        self._running: dict[int, list[Answer]] = {}
        self._finished: dict[int, FinishedGroup] = {}
        self._error: Exception | None = None
        self.watch: Watch | None = None
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        threading.Thread(target=self._save_finished, name="feed", daemon=True).start()

    def resume(self, step: int) -> list[str]:
        """Go on after a checkpoint of `step`. Returns the problems of files of finished groups, which run again."""
        saved, problems = self.journal.load(step * self.pool.groups_per_step)
        kept = self.pool.restore(step, {number: group.ages for number, group in saved.items()})
        self._finished = {number: saved[number] for number in kept}
        return problems

    def pushed(self, version: int) -> None:
        """All engines that sample hold `version`: begin what the pool admits."""
        with self._changed:
            self.pool.pushed(version)
            for group in self.pool.admit():
                self._running[group] = []
                for sample in range(self.pool.samples):
                    self.submit(group, sample).add_done_callback(partial(self._hand_over, group))

    def take(self) -> list[FinishedGroup]:
        """Begin a step: its groups, once they are finished. Raises what an engine raised.

        MachineError if an engine sampled with a version that it should not hold.
        """
        with self._changed:
            step = self.pool.step
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
        return groups

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
            if future.cancelled():
                continue
            try:
                self._add(number, future.result())
            except (MachineError, OSError) as error:  # for `take`
                with self._changed:
                    self._error = error
                    self._changed.notify()

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
