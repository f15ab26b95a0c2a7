"""Groups of the pool to engines, to disk, and to the trainer."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from dovetail.errors import Caught, MachineError
from dovetail.rl.asynchronous.checkpoint import FinishedGroup, Journal
from dovetail.rl.asynchronous.staleness import Pool
from dovetail.sampler.base import Completion, Watch

Done = tuple[int, "Future[Completion]"]
Submit = Callable[[Sequence[tuple[int, int]]], "Sequence[Future[Completion]]"]


class Feed:
    """submit: begin samples (group, number). keeps: trained groups until `forget`. A thread saves them."""

    def __init__(self, pool: Pool, journal: Journal, submit: Submit, *, keeps: bool = True) -> None:
        self.pool = pool
        self.journal = journal
        self.submit = submit
        self.keeps = keeps
        self._changed = threading.Condition()  # guards the pool and what follows
        self._running: dict[int, list[Completion]] = {}
        self._finished: dict[int, FinishedGroup] = {}
        self._error: BaseException | None = None
        self.watch: Watch | None = None  # gets samples of the step: complete, all; 0
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        threading.Thread(target=self._save_finished, name="feed", daemon=True).start()

    def resume(self, step: int, *, repeats: bool = True) -> list[str]:
        """After a checkpoint of `step`. Returns problems of finished groups that run again.

        repeats: later versions are the same policies again.
        """
        first = step * self.pool.groups_per_step
        saved, problems = self.journal.load(first)
        ages = {number: group.ages for number, group in saved.items()}
        known = {number: age for number, age in ages.items() if repeats or age[1] <= step}
        kept = self.pool.restore(step, known)
        self._finished = {number: saved[number] for number in kept}
        self.journal.drop(first, kept)  # a later start must not meet them
        if lost := len(saved) - len(kept):
            problems.append(
                f"{lost} groups of {self.journal.path} have tokens of policies that this run "
                "does not have"
            )
        return problems

    def pushed(self, version: int) -> None:
        """Engines hold `version`: begin what the pool admits."""
        with self._changed:
            self.pool.pushed(version)
            admitted = self.pool.admit()
            self._running |= {group: [] for group in admitted}
            samples = [(group, sample) for group in admitted for sample in range(self.pool.samples)]
            for (group, _), future in zip(samples, self.submit(samples), strict=True):
                future.add_done_callback(partial(self._hand_over, group))

    def take(self) -> list[FinishedGroup]:
        """Begin a step: its groups, once finished. Raises what an engine raised; MachineError for wrong versions."""
        with self._changed:
            step = self.pool.step
            first = self.pool.first
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
                    f"step {step + 1}: group {group.id} has tokens of versions {oldest} to "
                    f"{newest}; expected "
                    f"{max(0, step - self.pool.max_lag)} to {step}: an engine sampled with "
                    "weights that it should not hold"
                )
        if not self.keeps:
            self.journal.forget(first)
        return groups

    def counts(self) -> dict[str, int]:
        """Groups of later steps."""
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

    def _hand_over(self, group: int, future: "Future[Completion]") -> None:
        self._done.put((group, future))

    def _save_finished(self) -> None:
        caught = Caught(BaseException)
        while (done := self._done.get()) is not None:
            number, future = done
            if not future.cancelled():
                with caught:
                    self._add(number, future.result())
                with self._changed:
                    self._error = caught.error  # the first one, for `take`
                    self._changed.notify()

    def _add(self, number: int, answer: Completion) -> None:
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
