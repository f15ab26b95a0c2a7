"""Which changes of its recipe a run survives. Imports no torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest_body import STEP, read_body
from dovetail.errors import CheckpointError, ConfigError, listing, quoted
from dovetail.recipe.yaml import read_mapping
from dovetail.run.paths import (
    CHECKPOINTS,
    CONFIG,
    HF,
    OCCUPIED,
    FinishedError,
    changed,
    with_effect,
)
from dovetail.weights.safe_paths import MANIFEST, contained

Recipe = Mapping[str, Any]
Changes = Mapping[str, tuple[Any, Any]]  # dotted key -> (before, now)
ANEW = f"start a new run (another run_dir) with model.path=RUN_DIR/{CHECKPOINTS}/step_NNNNNN"
FIXED: Mapping[str, str] = {  # keys that may not change, and why
    "algorithm.name": "the algorithms keep different state",
    "trainer.seed": "data order and sampling follow it from the first step on",
    "data.shuffle": "rows would be taken twice, or not at all",
    "critic.path": "the critic goes on from the weights that it has learned, so another's would be ignored",
}
# Keys that a run without checkpoints may not change.
SOURCES = frozenset({"model.path", "data.train", "critic.path", "reference.path", "teacher.path"})
COUNTED = ("algorithm.epochs", "algorithm.num_mini_batches")  # optimizer steps of a step


def check_going_on(path: Path, recipe: Recipe) -> None:
    """Raise what resuming the run in `path` will raise, by its newest checkpoint.

    Says nothing where a checkpoint cannot be read: resuming may pass it over. FinishedError: there
    is nothing to do.
    """
    begun_with = changed_since(path, recipe)
    finished = (path / HF).exists()
    if finished and not with_effect(begun_with):
        raise FinishedError(path)
    if not any((path / CHECKPOINTS).glob("step_*")):
        refuse_unsaved(path, begun_with, recipe, finished=finished)
    elif (state := newest_state(path / CHECKPOINTS)) is not None:
        refuse(changed(state["recipe"], recipe), recipe, state["step"])
        if finished:
            refuse_done(path, begun_with, recipe, state["step"])


def changed_since(path: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Changes since the run in `path` began."""
    return changed(read_mapping(path / CONFIG), recipe)


def newest_state(folder: Path) -> Mapping[str, Any] | None:
    """The training state of the newest checkpoint; None where one cannot be read."""
    states: list[Mapping[str, Any]] = []
    for path in folder.glob("step_*"):
        if STEP.fullmatch(path.name) and not path.is_symlink():
            try:
                body = read_body(contained(path, MANIFEST).read_bytes(), str(path / MANIFEST))
            except (CheckpointError, OSError):
                return None
            states.append(body.get("state") or {})
    if not states or not all({"order", "step", "recipe"} <= state.keys() for state in states):
        return None
    return max(states, key=lambda state: int(state["order"]))


def refuse_unsaved(path: Path, begun_with: Changes, recipe: Recipe, *, finished: bool) -> None:
    """Raises what forbids a run without a checkpoint to go on."""
    if finished or begun_with.keys() & SOURCES:
        changes = described(with_effect(begun_with))
        why = f"it holds a run of another recipe that saved no checkpoint ({changes})"
        raise ConfigError(f"{OCCUPIED.format(path)}: {why}")
    refuse(begun_with, recipe, 0)


def refuse_done(path: Path, begun_with: Changes, recipe: Recipe, step: int) -> None:
    """ConfigError for a finished run whose newest checkpoint is of `step`, its last."""
    if step >= planned_steps(recipe):
        done = f"{holds_another(path, begun_with)}; all {step} steps of it are done ({path / HF})"
        edit = "choose another run_dir, or raise trainer.steps to train on"
        raise ConfigError(f"{done}: {edit}")


def holds_another(path: Path, begun_with: Changes) -> str:
    changes = described(with_effect(begun_with))
    return f"run_dir {path} holds a finished run of another recipe ({changes})"


def refuse(changes: Changes, recipe: Recipe, step: int) -> None:
    """changes: since the checkpoint of `step` was saved."""
    texts = {key: described({key: change}) for key, change in changes.items()}
    problems = [f"{texts[key]}: {why}" for key, why in FIXED.items() if key in changes]
    optim = recipe["optim"]
    steps = planned_steps(recipe)
    if optim["schedule"] != "constant" or optim["warmup_steps"]:
        why = "the learning rate's schedule counts optimizer steps, and would jump"
        problems += [f"{texts[key]}: {why}" for key in COUNTED if key in changes]
    if steps < step:
        problems.append(f"trainer.steps is {steps}, but the run has done {step} steps already")
    if problems:
        raise ConfigError(
            "the run cannot go on with these changes; take them back, or "
            f"{ANEW}:\n{listing(problems)}"
        )


def described(changes: Changes) -> str:
    return "; ".join(
        f"{key} was {quoted(before)}, is {quoted(now)}" for key, (before, now) in changes.items()
    )


def planned_steps(recipe: Recipe) -> float:
    """Infinite where the rows decide."""
    steps: float = recipe["trainer"]["steps"]
    return math.inf if recipe.get("data", {}).get("epochs") else steps
