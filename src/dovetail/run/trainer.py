"""The training loop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.engine.native import Engine
from dovetail.errors import NumericsError
from dovetail.launch.progress import Phase, Progress

if TYPE_CHECKING:  # the loop needs neither pydantic nor rich
    from dovetail.recipe.schema import TrainerSection
    from dovetail.run.directory import RunDirectory

Row = dict[str, Any]
TIMED: Seq[Phase] = ("push", "rollout", "reward", "score", "update", "save", "eval", "wait")


def evaluation_of(row: Mapping[str, Any]) -> Row:
    own = (
        name for name in row if name.startswith(("eval_", "eval/")) and not name.endswith("_before")
    )
    return {name: row[name] for name in own}


class Task(Protocol):
    """step (from 0) returns None if `stopping()` before anything changed."""

    @property
    def trained(self) -> Seq[Engine]: ...

    def step(self, step: int, stopping: Callable[[], bool] = ..., /) -> Row | None: ...

    def sample_rows(self) -> Seq[Row]: ...

    def evaluate(self, step: int, /) -> Row: ...


@dataclass(frozen=True)
class Outcome:
    """rows: of all steps, with earlier starts. stopped: by a signal. early: why there are fewer."""

    before: Row
    after: Row
    rows: list[Row]
    stopped: bool
    early: str = ""


class TimeBudget:
    """shared: rank 0's number (collective)."""

    def __init__(
        self, seconds: float | None, shared: Callable[[float], float], say: Callable[[str], None]
    ) -> None:
        self.seconds = seconds
        self.shared = shared
        self.say = say
        self.spent = ""  # why there is no room for a further step
        self._begun = self._trained_from = time.monotonic()
        self._done = self._steps = 0

    def start(self, steps: int) -> None:
        """After the first evaluation."""
        self._steps = steps
        self._trained_from = time.monotonic()
        evaluation = self._trained_from - self._begun
        if self.seconds is not None and steps and 2 * evaluation >= self.seconds:
            spent = f"{evaluation:.0f} s of trainer.time_budget_seconds={self.seconds:g}"
            self.say(
                f"the first evaluation took {spent}: one step follows, and the last evaluation"
            )

    def has_room(self) -> bool:
        """Collective. Whether another step and an evaluation fit."""
        self._done += 1
        if self.seconds is None or self._done == self._steps:
            return True
        now = time.monotonic()
        spent = now - self._begun
        mean = (now - self._trained_from) / self._done
        evaluation = self._trained_from - self._begun
        room = max(0, int((self.seconds - spent - evaluation) / max(mean, 1e-9)))
        room = int(self.shared(min(room, self._steps)))
        budget = f"trainer.time_budget_seconds={self.seconds:g}"
        if room == 0:
            done = (
                f"stopping after {self._done} of {self._steps} steps, which took {mean:.1f} s each"
            )
            self.spent = f"{budget} is spent"
            rest = f"the last evaluation takes about {evaluation:.0f} s"
            self.say(f"{done}: {spent:.0f} s of {budget} are spent, and {rest}")
        elif self._done == 1 and room + 1 < self._steps:
            whole = f"{self._steps} would take about {mean * self._steps:.0f} s"
            self.say(
                f"the first step took {mean:.1f} s, so {whole}; {budget} has room for about "
                f"{room + 1}"
            )
        return room > 0


class Guard:
    """Stops after skipped updates, or if replicas differ."""

    def __init__(self, max_skipped: int, check_replicas_every: int) -> None:
        self.max_skipped = max_skipped
        self.check_replicas_every = check_replicas_every
        self.skipped = 0

    def check(self, row: Mapping[str, Any], trained: Seq[Engine]) -> None:
        """Collective."""
        step = row["step"]
        self.skipped = self.skipped + 1 if row.get("skipped") else 0
        if self.skipped == self.max_skipped:
            raise NumericsError(
                f"step {step}: the updates of {self.skipped} steps in a row were skipped: "
                f"{row['fault']}; the weights are "
                "unchanged; the inputs of these steps are in run_dir under faults/; correct the "
                "data or the reward, lower "
                "optim.lr, or resume from an earlier checkpoint; trainer.max_skipped_steps "
                "allows more"
            )
        if self.check_replicas_every and step % self.check_replicas_every == 0:
            for engine in trained:
                engine.check_replicas()


def phase_metrics(seconds: Mapping[Phase, float], work: Mapping[str, tuple[int, int]]) -> Row:
    """work: tokens and samples of a phase."""
    row = {f"seconds/{phase}": seconds[phase] for phase in TIMED if phase in seconds}
    if "optimizer" in seconds:
        row["seconds/update"] = row.get("seconds/update", 0.0) + seconds["optimizer"]
    for phase, (tokens, samples) in work.items():
        spent = max(row.get(f"seconds/{phase}", math.inf), 1e-9)
        row |= {
            f"tokens_per_second/{phase}": tokens / spent,
            f"samples_per_second/{phase}": samples / spent,
        }
    return row


def train(
    task: Task, run: "RunDirectory", trainer: "TrainerSection", progress: Progress | None = None
) -> Outcome:
    progress, on, state = progress or Progress(), run.on, run.on.state

    def evaluate(step: int) -> Row:
        if row := task.evaluate(step):
            on.add_columns("on_evaluate", row, prefix="eval_")
        return row

    budget = TimeBudget(trainer.time_budget_seconds, run.shared, run.say)
    earlier = run.earlier()
    step, rows, before = earlier or (0, [], {})
    state.global_step = step
    state.max_steps = trainer.steps
    state.log_history = rows
    on("on_train_begin")
    before = before if earlier else evaluate(0)
    run.start(before)
    budget.start(trainer.steps - step)
    progress.phase("wait")
    progress.take_seconds()
    unwritten = {f"{name}_before": value for name, value in before.items()} if step == 0 else {}
    saved = step
    stop = run.stopping()
    reached = _reached(trainer.stop_at_reward, rows)
    guard = Guard(trainer.max_skipped_steps, trainer.check_replicas_every)
    if reached and step < trainer.steps:
        run.say(
            f"step {step} has reached trainer.stop_at_reward={trainer.stop_at_reward}: no "
            "further step is taken"
        )
    last = step >= trainer.steps or reached
    after = (
        {name: rows[-1][name] for name in before if rows[-1].get(name) is not None} if rows else {}
    )
    while not (last or stop):
        with run.profiler.around(step + 1):
            on("on_step_begin")
            begun = time.monotonic()
            if (metrics := task.step(step, run.stopping)) is None:
                stop = True
                break
            step += 1
            seconds = time.monotonic() - begun
            work = metrics.pop("work", {})
            row = {
                "step": step,
                **metrics,
                "step_seconds": seconds,
                "tokens_per_second": metrics["tokens"] / seconds,
            }
            rows.append(row)
            state.global_step = step
            on.add_columns("on_step_end", row)
            reached = _reached(trainer.stop_at_reward, rows)
            last = reached or not budget.has_room() or step == trainer.steps
            last |= state.should_training_stop
            due = state.takes("should_evaluate") or (
                trainer.eval_every and step % trainer.eval_every == 0
            )
            after = evaluate(step) if due or (last and not run.stopping()) else {}
            last |= bool(after) and state.should_training_stop
            progress.phase("wait")
            if trainer.max_lag is not None:  # engines sample all the time
                work.pop("rollout", None)
            row |= after | unwritten | phase_metrics(progress.take_seconds(), work)
            if trainer.max_lag is not None:
                row["trainer_idle"] = row["seconds/rollout"] / seconds
            unwritten = {}
            run.record(row, task.sample_rows())
            guard.check(row, task.trained)
            stop = run.stopping()
            if state.takes("should_save") or (
                trainer.save_every and step % trainer.save_every == 0
            ):
                progress.phase("save", step)
                run.checkpoint(step)
                saved = step
    if step > saved and (trainer.save_on_stop if stop else trainer.save_every):
        progress.phase("save", step)
        run.checkpoint(step)
    if stop:
        return Outcome(before, {}, rows, stop)
    if not after and (after := evaluate(step)):  # a stop came before it
        run.add_evaluation(after)
    early = (
        f"trainer.stop_at_reward={trainer.stop_at_reward} is reached" if reached else budget.spent
    )
    return Outcome(before, after, rows, stop, early if step < trainer.steps else "")


def _reached(target: float | None, rows: Seq[Row]) -> bool:
    reward = rows[-1].get("reward_mean") if rows else None
    return target is not None and reward is not None and bool(reward >= target)
