"""Whether a run directory is new, to be gone on from, or to be refused; and which changes of a recipe a run survives."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import LEFTOVERS, NONE, open_newest
from dovetail.errors import CheckpointError, ConfigError, quoted
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.layout import DEGREES
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.yaml import flat, read_mapping
from dovetail.run.lock import NAME as LOCK
from dovetail.run.state import RunState

CONFIG, HF, CHECKPOINTS, EVENTS = "config.yaml", "hf", "checkpoints", "events.jsonl"
BEFORE_CONFIG = frozenset({LOCK, EVENTS, "rollouts"})  # what a run that ended while it began may have left
FIXED: Mapping[str, str] = {  # keys that make another run of it, and why
    "algorithm.name": "the algorithms keep different state",
    "trainer.seed": "data order and sampling follow it from the first step on",
    "data.shuffle": "rows would be taken twice, or not at all",
    "critic.path": "the critic goes on from the weights that it has learned, so another's would be ignored",
}
ROWS: Mapping[str, str] = {  # by data.overlong: what decides which rows are fed
    "error": "data.train",
    "drop": "data.train, trainer.tokens_per_batch, rollout.max_new_tokens and layouts, by which data.overlong=drop drops rows,",
}
SOURCES = frozenset({"model.path", "data.train", "critic.path", "reference.path"})  # a run is known by, before it saves
COUNTED = ("algorithm.epochs", "algorithm.minibatches")  # optimizer steps of a step, by which schedules count


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from, and what there is to tell about it."""

    reader: ShardedReader
    state: RunState
    changes: tuple[str, ...]
    passed_over: tuple[str, ...]


class FinishedError(Exception):
    """This recipe's run is done: no mistake, and nothing to do."""


def is_run(path: Path) -> bool:
    """Whether `path` is the directory of a run that has begun; refused where it holds anything else."""
    if not path.exists():
        return False
    entries = path.iterdir() if path.is_dir() else [path]
    names = {entry.name for entry in entries if not any(map(entry.match, LEFTOVERS))}
    if CONFIG not in names and names - BEFORE_CONFIG:
        raise ConfigError(
            f"run_dir {path} is not empty; choose another run_dir, or move that one away: it holds no run to go on from "
            f"({CONFIG} is missing)"
        )
    return CONFIG in names


def find(
    path: Path, mesh: Mesh, mode: str, recipe: Mapping[str, Any], damaged: Mapping[str, str] = NONE
) -> Resumed | None:
    """What the run in `path` goes on from; None: it had saved nothing yet and begins again. Collective.

    `damaged`: the steps that it cannot go on from, as `open_newest` takes them. Raises FinishedError, on every rank, for a
    run of this very recipe that is finished.
    """
    exact = int(mode.partition("=")[2]) if mode.startswith("step=") else None
    with agreed(mesh):
        begun_with = changed(read_mapping(path / CONFIG), recipe)
        finished = (path / HF).exists() and exact is None
    if of_first(finished and not begun_with, mesh):
        further = "raise trainer.steps to train on" if _saved(path) else "choose another run_dir to train again"
        raise FinishedError(f"run_dir {path} holds this run, which is finished: nothing to do ({path / HF}); {further}")
    reader, passed_over = open_newest(path / CHECKPOINTS, mesh, exact, damaged)
    if reader is None:
        if finished or begun_with.keys() & SOURCES:
            raise ConfigError(
                f"run_dir {path} is not empty; choose another run_dir, or move that one away: it holds a run of another "
                "recipe that saved no checkpoint"
            )
        refuse(begun_with, recipe, 0)
        return None
    state = RunState.parse(reader.manifest.state, reader.path)
    ranks = prod(degree for axis, degree in reader.manifest.layout.items() if axis != "ep")
    if len(state.rng) != ranks:
        raise CheckpointError(f"{reader.path}: rng is of {len(state.rng)} ranks, but {ranks} have saved it")
    changes = changed(state.recipe, recipe)
    refuse(changes, recipe, state.step)
    if finished and state.step >= recipe["trainer"]["steps"]:
        raise ConfigError(
            f"run_dir {path} is not empty; choose another run_dir, or raise trainer.steps to train on: all {state.step} "
            f"steps of its run are done ({path / HF})"
        )
    if "data.eval" in changes:
        state = replace(state, before={})  # of other rows: nothing to compare with
    was, now = _ranks(reader.manifest.layout), _ranks(vars(mesh.layout))
    if was != now:
        changes["ranks"] = was, now
    told = tuple(f"{key}: {quoted(before)} -> {quoted(after)}" for key, (before, after) in changes.items())
    return Resumed(reader, state, told, tuple(passed_over))


def _saved(path: Path) -> bool:
    """Whether a run left checkpoints to train on from; one with save_every=0 did not."""
    return any((path / CHECKPOINTS).glob("step_*"))


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its two values, of every key that differs; where the run writes is no part of it."""
    old, new = flat(before), flat(now)
    keys = [key for key in {**old, **new} if key != "run_dir"]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _ranks(degrees: Mapping[str, Any]) -> str:
    """How a model is cut, for people: the degrees that are not 1."""
    return ",".join(f"{name}={degrees[name]}" for name in DEGREES if degrees.get(name, 1) != 1) or "one"


def refuse(changes: Mapping[str, tuple[Any, Any]], recipe: Mapping[str, Any], step: int) -> None:
    """Raise for the changes that cannot be right for a run that has done `step` steps."""
    was_and_is = {key: f"{key} was {quoted(before)}, is {quoted(after)}" for key, (before, after) in changes.items()}
    problems = [f"{was_and_is[key]}: {why}" for key, why in FIXED.items() if key in changes]
    optim, steps = recipe["optim"], recipe["trainer"]["steps"]
    if optim["schedule"] != "constant" or optim["warmup_steps"]:
        problems += [
            f"{was_and_is[key]}: the learning rate's schedule counts optimizer steps, and would jump"
            for key in COUNTED
            if key in changes
        ]
    if steps < step:
        problems.append(f"trainer.steps is {steps}, but the run has done {step} steps already")
    if problems:
        raise ConfigError(
            "the run cannot go on with these changes; take them back, or start a new run (another run_dir) with "
            f"model.path=RUN_DIR/{CHECKPOINTS}/step_NNNNNN:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


def refuse_other(what: str, before: str, now: str, keys: str) -> None:
    """Raise where a fingerprint differs: the same names, but not the same content."""
    if before != now:
        raise ConfigError(
            f"the run cannot go on: {what} changed since it was saved; restore what {keys} named then, or start a new "
            f"run (another run_dir) with model.path=RUN_DIR/{CHECKPOINTS}/step_NNNNNN"
        )
