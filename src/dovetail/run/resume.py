"""What a run resumes from, and which changes of its recipe are allowed."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import NONE, open_newest
from dovetail.errors import CheckpointError, ConfigError, listing, quoted
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.layout import DEGREES
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.keys import rename_keys
from dovetail.recipe.yaml import read_mapping
from dovetail.run.metrics import METRICS
from dovetail.run.paths import (
    CHECKPOINTS,
    CONFIG,
    HF,
    OCCUPIED,
    FinishedError,
    changed,
    with_effect,
)
from dovetail.run.state import RunState

ANEW = f"start a new run (another run_dir) with model.path=RUN_DIR/{CHECKPOINTS}/step_NNNNNN"
FIXED: Mapping[str, str] = {  # keys that may not change, and why
    "algorithm.name": "the algorithms keep different state",
    "trainer.seed": "data order and sampling follow it from the first step on",
    "data.shuffle": "rows would be taken twice, or not at all",
    "critic.path": "the critic goes on from the weights that it has learned, so another's would be ignored",
}
ROWS: Mapping[str, str] = {  # by data.overlong_rows
    "error": "data.train",
    "drop": "data.train, trainer.tokens_per_batch, rollout.max_new_tokens and layouts, by which rows are dropped,",
}
# of a run without checkpoints
SOURCES = frozenset({"model.path", "data.train", "critic.path", "reference.path", "teacher.path"})
EVALUATED = ("data.eval", "eval.sets")
COUNTED = ("algorithm.epochs", "algorithm.num_mini_batches")  # optimizer steps of a step


@dataclass(frozen=True)
class Resumed:
    reader: ShardedReader
    state: RunState
    changes: tuple[str, ...]
    passed_over: tuple[str, ...]
    repeats: bool  # the next steps come out as before


def find(
    path: Path, mesh: Mesh, mode: str, recipe: Mapping[str, Any], damaged: Mapping[str, str] = NONE
) -> Resumed | None:
    """Collective. None: no checkpoint. FinishedError: nothing to do."""
    exact = int(mode.partition("=")[2]) if mode.startswith("step=") else None
    with agreed(mesh):
        begun_with = changed(rename_keys(read_mapping(path / CONFIG))[0], recipe)
        finished = (path / HF).exists() and exact is None
    other = with_effect(begun_with)
    if of_first(finished and not other, mesh):
        raise FinishedError(path)
    differing = "; ".join(_described(key, change) for key, change in other.items())
    reader, passed_over = open_newest(path / CHECKPOINTS, mesh, exact, damaged)
    if reader is None:
        if finished or begun_with.keys() & SOURCES:
            why = f"it holds a run of another recipe that saved no checkpoint ({differing})"
            raise ConfigError(f"{OCCUPIED.format(path)}: {why}")
        refuse(begun_with, recipe, 0)
        return None
    state = RunState.parse(reader.manifest.state, reader.path)
    ranks = prod(degree for axis, degree in reader.manifest.layout.items() if axis != "ep")
    if len(state.rng) != ranks:
        raise CheckpointError(f"{reader.path}: rng is of {len(state.rng)} ranks, but {ranks} have saved it")
    changes = changed(rename_keys(state.recipe)[0], recipe)
    holds = f"run_dir {path} holds a finished run of another recipe ({differing})"
    refuse(changes, recipe, state.step)
    if finished and state.step >= _planned(recipe):
        edit = "choose another run_dir, or raise trainer.steps to train on"
        raise ConfigError(f"{holds}; all {state.step} steps of it are done ({path / HF}): {edit}")
    if finished and state.step < (last := _last_step(path / METRICS)):
        edit = f"choose another run_dir, or go back to it by --resume step={state.step}"
        raise ConfigError(f"{holds}, whose newest checkpoint is of step {state.step} of {last}: {edit}")
    if any(any(changes.get(key, ())) for key in EVALUATED):
        state = state.model_copy(update={"before": {}})  # of other rows: not comparable
    was, now = _ranks(reader.manifest.layout), _ranks(vars(mesh.layout))
    if was != now:
        changes["ranks"] = was, now
    shown = tuple(f"{key}: {quoted(before)} -> {quoted(after)}" for key, (before, after) in changes.items())
    return Resumed(reader, state, shown, tuple(passed_over), repeats=was == now and not with_effect(changes))


def _last_step(metrics: Path) -> int:
    """0: unknown."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(json.loads(metrics.read_bytes().splitlines()[-1])["step"])
    return 0


def _described(key: str, change: tuple[Any, Any]) -> str:
    return f"{key} was {quoted(change[0])}, is {quoted(change[1])}"


def _planned(recipe: Mapping[str, Any]) -> float:
    steps: float = recipe["trainer"]["steps"]
    return math.inf if recipe.get("data", {}).get("epochs") else steps


def _ranks(degrees: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={degrees[name]}" for name in DEGREES if degrees.get(name, 1) != 1) or "one"


def refuse(changes: Mapping[str, tuple[Any, Any]], recipe: Mapping[str, Any], step: int) -> None:
    descriptions = {key: _described(key, change) for key, change in changes.items()}
    problems = [f"{descriptions[key]}: {why}" for key, why in FIXED.items() if key in changes]
    optim, steps = recipe["optim"], _planned(recipe)
    if optim["schedule"] != "constant" or optim["warmup_steps"]:
        why = "the learning rate's schedule counts optimizer steps, and would jump"
        problems += [f"{descriptions[key]}: {why}" for key in COUNTED if key in changes]
    if steps < step:
        problems.append(f"trainer.steps is {steps}, but the run has done {step} steps already")
    if problems:
        raise ConfigError(f"the run cannot go on with these changes; take them back, or {ANEW}:\n{listing(problems)}")


def refuse_other(what: str, before: str, now: str, keys: str) -> None:
    if before != now:
        changed_inputs = f"{what} changed since it was saved; restore what {keys} named then"
        raise ConfigError(f"the run cannot go on: {changed_inputs}, or {ANEW}")
