"""`trainer.time_budget_seconds`: after every step, whether the next one and the last evaluation still fit."""

import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from dovetail.rl.experience import (
    Sample,
)
from dovetail.rl.step_metrics import Guard, Row
from dovetail.rl.tasks import LoopSettings, Task


class TimeBudget:
    """Counts from its making, so that the evaluation before training is part of it; `seconds` None: no limit.

    shared: gives every rank the first rank's number, a collective. say: prints a line.
    """

    def __init__(self, seconds: float | None, shared: Callable[[float], float], say: Callable[[str], None]) -> None:
        self.seconds, self.shared, self.say = seconds, shared, say
        self._begun = self._trained_from = time.monotonic()
        self._done = self._steps = 0

    def start(self, steps: int) -> None:
        """The evaluation before training is over; `steps` are to be done."""
        self._steps, self._trained_from = steps, time.monotonic()

    def has_room(self) -> bool:
        """After a step: whether another one ends in time, with an evaluation as long as the first. Collective."""
        self._done += 1
        if self.seconds is None or self._done == self._steps:
            return True
        now = time.monotonic()
        spent, mean = now - self._begun, (now - self._trained_from) / self._done
        evaluation = self._trained_from - self._begun
        room = max(0, int((self.seconds - spent - evaluation) / max(mean, 1e-9)))
        room = int(self.shared(min(room, self._steps)))
        budget = f"trainer.time_budget_seconds={self.seconds:g}"
        if room == 0:
            self.say(
                f"stopping after {self._done} of {self._steps} steps, which took {mean:.1f} s each: {spent:.0f} s of {budget} "
                f"are spent, and the last evaluation takes about {evaluation:.0f} s"
            )
        elif self._done == 1 and room + 1 < self._steps:
            self.say(
                f"the first step took {mean:.1f} s, so {self._steps} would take about {mean * self._steps:.0f} s; {budget} has "
                f"room for about {room + 1}"
            )
        return room > 0


class Run(Protocol):
    """Where a run writes and what it shows; `rl.run.RunDirectory` in earnest. All calls are collective."""

    def earlier(self) -> tuple[int, list[Row], Row] | None:
        """Of a run that goes on from a checkpoint: steps done, their rows, and the evaluation before training."""
        ...

    def start(self, evaluation: Row) -> None:
        """The run begins; `evaluation` is of the model before training, empty without held-out rows."""
        ...

    def record(self, row: Row, samples: Seq[Sample]) -> None:
        """A step is done."""
        ...

    def checkpoint(self, step: int) -> None: ...

    def stopping(self) -> bool:
        """Whether somebody asked the run to stop; the same on every rank."""
        ...

    def shared(self, seconds: float) -> float:
        """The first rank's clock, for decisions that all ranks must take alike."""
        ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the evaluations before and after, every row, and whether it was asked to stop."""

    before: Row
    after: Row
    rows: list[Row]
    stopped: bool


def train(task: Task, run: Run, loop: LoopSettings) -> Outcome:
    """Run the steps until the last one, the reward target, the time budget, or a request to stop, whichever is first."""
    budget = TimeBudget(loop.time_budget_seconds, run.shared, run.say)
    step, rows, before = run.earlier() or (0, [], task.evaluate(0))
    run.start(before)
    budget.start(loop.steps - step)
    unwritten = {f"{name}_before": value for name, value in before.items()} if step == 0 else {}
    saved, stop, reached = step, run.stopping(), loop.reached(rows)
    guard = Guard(loop.max_skipped_steps, loop.check_replicas_every)
    if reached and step < loop.steps:
        run.say(f"step {step} has reached trainer.stop_at_reward={loop.stop_at_reward}: no further step is taken")
    last = step >= loop.steps or reached
    while not (last or stop):
        begun = time.monotonic()
        done = task.step(step, run.stopping)
        if done is None:
            stop = True
            break
        step += 1
        seconds = time.monotonic() - begun
        row = {"step": step, **done, "step_seconds": seconds, "tokens_per_second": done["tokens"] / seconds}
        rows.append(row)
        last = loop.reached(rows) or not budget.has_room() or step == loop.steps
        if (loop.eval_every and step % loop.eval_every == 0) or (last and not run.stopping()):
            row |= task.evaluate(step)
        row |= unwritten
        unwritten = {}
        run.record(row, task.samples)
        guard.look(row, task.trained)
        stop = run.stopping()
        if loop.save_every and step % loop.save_every == 0:
            loop.progress.phase("save", step)
            run.checkpoint(step)
            saved = step
    if step > saved and (loop.save_on_stop if stop else loop.save_every):
        loop.progress.phase("save", step)
        run.checkpoint(step)
    if stop:
        return Outcome(before, {}, rows, stop)
    evaluated = {name: rows[-1][name] for name in before if rows[-1].get(name) is not None} if rows else {}
    return Outcome(before, evaluated or task.evaluate(step), rows, stop)
