"""The training loop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.engine.native import Engine
from dovetail.errors import NumericsError
from dovetail.launch.progress import Phase, Progress
from dovetail.run.budget import TimeBudget
from dovetail.run.outcome import Outcome, Row

if TYPE_CHECKING:  # the loop needs neither pydantic nor rich
    from dovetail.recipe.schema import TrainerSection
    from dovetail.run.directory import RunDirectory

TIMED: Seq[Phase] = ("push", "rollout", "reward", "score", "update", "save", "eval", "wait")


class TrainTask(Protocol):
    """One step of an algorithm, counted from 0, and its evaluation.

    A step returns None if `stopping()` before anything changed.
    """

    @property
    def trained(self) -> Seq[Engine]: ...

    def step(self, step: int, stopping: Callable[[], bool] = ..., /) -> Row | None: ...

    def sample_rows(self) -> Seq[Row]: ...

    def evaluate(self, step: int, /) -> Row: ...


class StepGuard:
    """Ends a run after skipped updates, or if replicas differ."""

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
                f"{row['fault']}; the weights are unchanged; the inputs of these steps are in "
                "run_dir under faults/; correct the data or the reward, lower optim.lr, or resume "
                "from an earlier checkpoint; trainer.max_skipped_steps allows more"
            )
        if _is_due(self.check_replicas_every, step):
            for engine in trained:
                engine.check_replicas()


class TrainingLoop:
    """Steps, evaluations and checkpoints of a run, in their order. Collective.

    step: steps done. rows: those of earlier starts, too. after: the evaluation of the last row.
    """

    def __init__(
        self, task: TrainTask, run: "RunDirectory", trainer: "TrainerSection", progress: Progress
    ) -> None:
        self.task = task
        self.run = run
        self.trainer = trainer
        self.progress = progress
        self.callbacks = run.callbacks
        self.state = run.callbacks.state
        self.budget = TimeBudget(trainer.time_budget_seconds, run.shared, run.say)
        self.guard = StepGuard(trainer.max_skipped_steps, trainer.check_replicas_every)
        earlier = run.earlier()
        self.is_resumed = earlier is not None
        self.step, self.rows, self.before = earlier or (0, [], {})
        self.saved_step = self.step
        self.after: Row = {}
        self._unwritten: Row = {}  # the first evaluation, until a row has it

    def train(self) -> Outcome:
        self._begin()
        stopped = self.run.stopping()
        finished = self.step >= self.trainer.steps or self._reward_is_reached()
        while not (finished or stopped):
            with self.run.profiler.around(self.step + 1):
                work = self._take_step()
                if work is None:
                    stopped = True
                    break
                finished = self._evaluate_if_due(is_last=self._is_last())
                self._record(work)
                stopped = self.run.stopping()
                asked = self.state.pop_flag("should_save")
                if asked or _is_due(self.trainer.save_every, self.step):
                    self._save()
        saves_last = self.trainer.save_on_stop if stopped else self.trainer.save_every
        if self.step > self.saved_step and saves_last:
            self._save()
        if stopped:
            return Outcome(self.before, {}, self.rows, stopped)
        if not self.after:  # a stop came before it
            self.after = self._evaluate()
            if self.after:
                self.run.add_evaluation(self.after)
        return Outcome(self.before, self.after, self.rows, stopped, self._why_early())

    def _begin(self) -> None:
        self.state.global_step = self.step
        self.state.max_steps = self.trainer.steps
        self.state.log_history = self.rows
        self.callbacks("on_train_begin")
        if not self.is_resumed:
            self.before = self._evaluate()
        if self.rows:
            last = self.rows[-1]
            self.after = {name: last[name] for name in self.before if last.get(name) is not None}
        if self.step == 0:
            self._unwritten = {f"{name}_before": value for name, value in self.before.items()}
        self.run.start(self.before)
        self.budget.start(self.trainer.steps - self.step)
        self.progress.phase("wait")
        self.progress.take_seconds()
        if self._reward_is_reached() and self.step < self.trainer.steps:
            target = f"trainer.stop_at_reward={self.trainer.stop_at_reward}"
            self.run.say(f"step {self.step} has reached {target}: no further step is taken")

    def _take_step(self) -> Mapping[str, tuple[int, int]] | None:
        """Appends the row of a step; returns tokens and samples of its phases; None: stopped."""
        self.callbacks("on_step_begin")
        begun = time.monotonic()
        metrics = self.task.step(self.step, self.run.stopping)
        if metrics is None:
            return None
        self.step += 1
        seconds = time.monotonic() - begun
        work: dict[str, tuple[int, int]] = metrics.pop("work", {})
        row = {
            "step": self.step,
            **metrics,
            "step_seconds": seconds,
            "tokens_per_second": metrics["tokens"] / seconds,
        }
        self.rows.append(row)
        self.state.global_step = self.step
        self.callbacks.add_columns("on_step_end", row)
        return work

    def _is_last(self) -> bool:
        """Collective."""
        ends = self._reward_is_reached() or not self.budget.has_room()
        return ends or self.step == self.trainer.steps or self.state.should_training_stop

    def _evaluate_if_due(self, *, is_last: bool) -> bool:
        """Returns whether the run ends after this step, as a callback may decide here."""
        asked = self.state.pop_flag("should_evaluate")
        self.after = {}
        if (
            asked
            or _is_due(self.trainer.eval_every, self.step)
            or (is_last and not self.run.stopping())
        ):
            self.after = self._evaluate()
        return is_last or (bool(self.after) and self.state.should_training_stop)

    def _evaluate(self) -> Row:
        row = self.task.evaluate(self.step)
        if row:
            self.callbacks.add_columns("on_evaluate", row, prefix="eval_")
        return row

    def _record(self, work: Mapping[str, tuple[int, int]]) -> None:
        row = self.rows[-1]
        self.progress.phase("wait")
        if self.trainer.max_lag is not None:  # servers sample all the time
            work = {phase: done for phase, done in work.items() if phase != "rollout"}
        timed = phase_metrics(self.progress.take_seconds(), work)
        row |= self.after | self._unwritten | timed
        if self.trainer.max_lag is not None:
            row["trainer_idle"] = row["seconds/rollout"] / row["step_seconds"]
        self._unwritten = {}
        self.run.record(row, self.task.sample_rows())
        self.guard.check(row, self.task.trained)

    def _save(self) -> None:
        self.progress.phase("save", self.step)
        self.run.checkpoint(self.step)
        self.saved_step = self.step

    def _reward_is_reached(self) -> bool:
        """Whether the last row has the reward of trainer.stop_at_reward."""
        target = self.trainer.stop_at_reward
        reward = self.rows[-1].get("reward_mean") if self.rows else None
        return target is not None and reward is not None and bool(reward >= target)

    def _why_early(self) -> str:
        if self.step >= self.trainer.steps:
            return ""
        if self._reward_is_reached():
            return f"trainer.stop_at_reward={self.trainer.stop_at_reward} is reached"
        return self.budget.spent


def train(
    task: TrainTask,
    run: "RunDirectory",
    trainer: "TrainerSection",
    progress: Progress | None = None,
) -> Outcome:
    """Trains to the end of the run. Collective."""
    return TrainingLoop(task, run, trainer, progress or Progress()).train()


def phase_metrics(seconds: Mapping[Phase, float], work: Mapping[str, tuple[int, int]]) -> Row:
    """Returns seconds of each phase, and their tokens and samples a second from `work`."""
    row = {f"seconds/{phase}": seconds[phase] for phase in TIMED if phase in seconds}
    if "optimizer" in seconds:
        row["seconds/update"] = row.get("seconds/update", 0.0) + seconds["optimizer"]
    for phase, (tokens, samples) in work.items():
        spent = max(row.get(f"seconds/{phase}", math.inf), 1e-9)
        row[f"tokens_per_second/{phase}"] = tokens / spent
        row[f"samples_per_second/{phase}"] = samples / spent
    return row


def _is_due(every: int, step: int) -> bool:
    """every: 0 for never."""
    return every > 0 and step % every == 0
