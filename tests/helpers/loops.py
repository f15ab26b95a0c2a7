"""The training loop with tasks and runs that only pretend to work."""

from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from dovetail.engine.native import Engine
from dovetail.launch.progress import Progress
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import TrainerSection, make_recipe
from dovetail.recipe.tracking import ProfileSection
from dovetail.rl.step_metrics import Row
from dovetail.run import budget, trainer
from dovetail.run.callbacks import Callbacks, TrainerState
from dovetail.run.outcome import Outcome
from dovetail.run.profiler import Profiler
from dovetail.run.trainer import TrainTask


def loop(**keys: Any) -> TrainerSection:
    """A trainer section of five steps that saves nothing."""
    return TrainerSection(
        **{"steps": 5, "prompts_per_step": 4, "save_every": 0, "check_replicas_every": 0, **keys}
    )


LOOP = loop()


def train(task: TrainTask, run: Any, section: TrainerSection) -> Outcome:
    """The loop with a run that only pretends to write."""
    return trainer.train(task, run, section)


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class PretendedTask:
    """Takes `seconds` a step; its reward is the step's number over ten."""

    def __init__(self, clock: Clock, seconds: float = 1.0, *, held_out: bool = True) -> None:
        self.clock, self.seconds, self.held_out = clock, seconds, held_out
        self.trained: list[Engine] = []
        self.evaluated: list[int] = []

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row:
        self.clock.now += self.seconds
        return {"tokens": 10, "loss": 0.0, "reward_mean": (step + 1) / 10}

    def sample_rows(self) -> list[Row]:
        return []

    def evaluate(self, step: int) -> Row:
        if not self.held_out:
            return {}
        self.evaluated.append(step)
        return {"eval_reward_mean": float(step)}


class PretendedRun:
    def __init__(self, stop_after: int = 1000, done: Seq[Row] = ()) -> None:
        self.done = list(done)
        self.rows: list[Row] = []
        self.said: list[str] = []
        self.checkpoints: list[int] = []
        self.started: list[Row] = []
        self.stop_after = stop_after
        self.callbacks = Callbacks(
            TrainerState(
                make_recipe({"model": {"path": "m"}, "data": {"train": "rows"}, "run_dir": "run"}),
                True,
            ),
            Mesh.solo(),
        )
        self.profiler = Profiler(
            ProfileSection(), Path(), Mesh.solo(), Progress(), self.said.append
        )

    def earlier(self) -> tuple[int, list[Row], Row] | None:
        """Nothing where a run begins anew."""
        return (len(self.done), list(self.done), {"eval_reward_mean": 0.0}) if self.done else None

    def start(self, evaluation: Row) -> None:
        self.started.append(evaluation)

    def record(self, row: Row, samples: Seq[Row]) -> None:
        self.rows.append(row)

    def checkpoint(self, step: int) -> None:
        self.checkpoints.append(step)

    def stopping(self) -> bool:
        return len(self.rows) >= self.stop_after

    def add_evaluation(self, evaluation: Row) -> None:
        self.started.append(evaluation)

    def shared(self, seconds: float) -> float:
        return seconds

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    monkeypatch.setattr(trainer, "time", clock)
    return clock
