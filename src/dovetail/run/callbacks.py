"""Callbacks of the training loop, with names of transformers' TrainerCallback."""

import json
import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engine.native import Engine
from dovetail.errors import CallbackError, quoted
from dovetail.parallel.consensus import of_all, of_first
from dovetail.parallel.mesh import Mesh

if TYPE_CHECKING:  # the loop does not need pydantic
    from dovetail.recipe.schema import Recipe

FLAGS = ("should_training_stop", "should_evaluate", "should_save")


@dataclass
class TrainerState:
    """What a callback sees of the run; it may change the engines' `param_groups`, and set what begins with should_.

    global_step: steps done, those before a resume too. log_history: a row of metrics for each. critic: of PPO.
    should_training_stop: end as after the last step, once the current or the next step is done.
    should_evaluate, should_save: after the current or the next step, too. One rank that sets them is enough.
    """

    recipe: "Recipe"
    is_world_process_zero: bool
    engine: Engine = field(init=False)
    critic: Engine | None = None
    global_step: int = 0
    max_steps: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    should_training_stop: bool = False
    should_evaluate: bool = False
    should_save: bool = False

    def pop_flag(self, flag: str) -> bool:
        """Returns and clears a flag."""
        is_set = bool(vars(self)[flag])
        setattr(self, flag, False)
        return is_set


class TrainerCallback:
    """Override what you need. Every method is called on every rank, and has to do the same on all of them.

    So the engine's calls (`state.engine.score`, `generate`, ...) are allowed. An exception ends the run on all ranks with a
    CallbackError; what was saved stays.
    """

    def on_train_begin(self, state: TrainerState) -> None:
        """Called before the first evaluation, or where a resumed run goes on."""

    def on_step_begin(self, state: TrainerState) -> None:
        """May set `lr` and `weight_decay` in `state.engine.param_groups` for this step."""

    def on_rollout_end(self, state: TrainerState, samples: list[Any]) -> list[Any] | None:
        """RL: after sampling and rewards. samples: `dt.Sample`s, groups of a prompt together.

        May return another list: without some samples, or with `dataclasses.replace(sample, reward=x)`. Advantages, metrics
        and rollouts/ are made from it. None: as they are.
        """

    def on_step_end(self, state: TrainerState, metrics: dict[str, Any]) -> None:
        """Called after the update. May add numbers to the row of metrics.jsonl; rank 0's are written."""

    def on_evaluate(self, state: TrainerState, metrics: dict[str, Any]) -> None:
        """Called after each evaluation, also before training. May add numbers named `eval_...`."""

    def on_save(self, state: TrainerState, path: Path) -> None:
        """When a checkpoint is whole: with `trainer.async_save` maybe some steps later."""

    def on_train_end(self, state: TrainerState) -> None:
        """Called when `hf/` or the checkpoint of a stopped run is written; not after an error."""


class Callbacks:
    """Calls the callbacks of a run, all ranks together. Collective."""

    def __init__(self, state: TrainerState, mesh: Mesh) -> None:
        self.state = state
        self.mesh = mesh
        self.callbacks: Seq[TrainerCallback] = ()

    def __call__(self, event: str, *given: Any) -> None:
        for each in self.callbacks:
            self._call(event, each, lambda method: method(self.state, *given))

    def add_columns(self, event: str, row: dict[str, Any], prefix: str = "") -> None:
        """Callbacks may add numbers to `row` whose names begin with `prefix`."""
        for each in self.callbacks:
            mine = dict(row)
            self._call(event, each, partial(self._add, row, mine, prefix))
            added = {name: value for name, value in mine.items() if name not in row}
            row |= of_first(added, self.mesh)

    def _add(
        self, row: dict[str, Any], mine: dict[str, Any], prefix: str, method: Callable[..., object]
    ) -> None:
        method(self.state, mine)
        _check_columns(row, mine, prefix)

    def replace_samples(self, samples: list[Any]) -> list[Any]:
        """Returns the samples as `on_rollout_end` of each callback changes them."""
        known = {sample.completion.id for sample in samples}

        def replace(method: Callable[..., list[Any] | None]) -> list[Any]:
            result = method(self.state, list(samples))
            for sample in result or ():
                _check_sample(sample, type(samples[0]), known)
            return samples if result is None else list(result)

        for each in self.callbacks if samples else ():
            samples = self._call("on_rollout_end", each, replace)
            rewards = [[*sample.completion.id, float(sample.reward)] for sample in samples]
            if len({*of_all(json.dumps(rewards), self.mesh)}) > 1:
                name = f"{type(each).__name__}.on_rollout_end"
                raise CallbackError(
                    f"{name} returned other samples or rewards on other ranks; make them equal"
                )
        return samples

    def _call(self, event: str, callback: TrainerCallback, call: Callable[[Any], Any]) -> Any:
        """Calls a method of `callback`. An exception on one rank raises on all."""
        name = f"{type(callback).__name__}.{event}"
        try:
            result = call(getattr(callback, event))
        except Exception as error:
            raise CallbackError(self._problem(name, f"{type(error).__name__}: {error}")) from error
        problem = self._problem(name, "")
        if problem:
            raise CallbackError(problem)
        return result

    def _problem(self, name: str, mine: str) -> str:
        """Returns the error of any rank, "" for none; also combines the flags."""
        state = self.state
        ranks = of_all([mine, *(vars(state)[flag] for flag in FLAGS)], self.mesh)
        for i, flag in enumerate(FLAGS):
            setattr(state, flag, any(rank[1 + i] for rank in ranks))
        failed = {rank: theirs[0] for rank, theirs in enumerate(ranks) if theirs[0]}
        if not failed:
            return ""
        where = f" on rank {', '.join(map(str, failed))}" if len(ranks) > 1 else ""
        after = f"after step {state.global_step} of {state.max_steps}"
        first = next(iter(failed.values()))
        return f"{name} failed{where}, {after}: {first}; what the run has saved is whole"


def _check_columns(row: dict[str, Any], mine: dict[str, Any], prefix: str) -> None:
    """ValueError unless `mine` is `row` with further numbers."""
    for name in {**row, **mine}:
        if name in row and (name not in mine or mine[name] is not row[name]):
            raise ValueError(f"{name!r} is a column of the run; add one under another name")
        if name in row or (name.startswith(prefix) and isinstance(mine[name], (int, float))):
            continue
        start = f"a name that begins with {prefix}, and " if prefix else ""
        raise ValueError(f"added {name!r}: {type(mine[name]).__name__}; expected {start}a number")


def _check_sample(sample: Any, kind: type, known: set[Any]) -> None:
    is_sample: bool = isinstance(sample, kind)
    if not is_sample or sample.completion.id not in known:
        raise TypeError(
            "expected None, or a list of samples it was given, changed by dataclasses.replace"
        )
    if not (isinstance(sample.reward, (int, float)) and math.isfinite(sample.reward)):
        reward = quoted(sample.reward)
        raise ValueError(f"the reward {reward} of {sample.prompt.id!r}: not a finite number")
