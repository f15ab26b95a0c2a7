"""What a run resumes from, and which changes of its recipe are allowed."""

import json
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
from dovetail.run.changes import (
    ANEW,
    changed_since,
    holds_another,
    refuse,
    refuse_done,
    refuse_unsaved,
)
from dovetail.run.metrics import METRICS
from dovetail.run.paths import CHECKPOINTS, HF, FinishedError, changed, with_effect
from dovetail.run.state import RunState

ROWS: Mapping[str, str] = {  # by data.overlong_rows
    "error": "data.train",
    "drop": "data.train, trainer.tokens_per_batch, rollout.max_new_tokens and layouts, by which rows are dropped,",
}
EVALUATED = ("data.eval", "eval.sets")


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
        begun_with = changed_since(path, recipe)
        finished = (path / HF).exists() and exact is None
    if of_first(finished and not with_effect(begun_with), mesh):
        raise FinishedError(path)
    reader, passed_over = open_newest(path / CHECKPOINTS, mesh, exact, damaged)
    if reader is None:
        refuse_unsaved(path, begun_with, recipe, finished=finished)
        return None
    state = RunState.parse(reader.manifest.state, reader.path)
    ranks = prod(degree for axis, degree in reader.manifest.layout.items() if axis != "ep")
    if len(state.rng) != ranks:
        raise CheckpointError(
            f"{reader.path}: rng is of {len(state.rng)} ranks, but {ranks} have saved it"
        )
    changes = changed(state.recipe, recipe)
    refuse(changes, recipe, state.step)
    if finished:
        refuse_done(path, begun_with, recipe, state.step)
    last = _last_step(path / METRICS)
    if finished and state.step < last:
        edit = (
            f"go back to step {state.step} by --resume step={state.step}, or choose another run_dir"
        )
        if passed_over:
            lost = f"the finished run in run_dir {path} cannot go on from its last step"
            raise CheckpointError(f"{lost}: {edit}\n{listing(passed_over)}")
        saved = f"whose newest checkpoint is of step {state.step} of {last}"
        raise ConfigError(f"{holds_another(path, begun_with)}, {saved}: {edit}")
    if any(any(changes.get(key, ())) for key in EVALUATED):
        state = state.model_copy(update={"before": {}})  # of other rows: not comparable
    was = _ranks(reader.manifest.layout)
    now = _ranks(vars(mesh.layout))
    if was != now:
        changes["ranks"] = was, now
    shown = tuple(
        f"{key}: {quoted(before)} -> {quoted(after)}" for key, (before, after) in changes.items()
    )
    return Resumed(
        reader, state, shown, tuple(passed_over), repeats=was == now and not with_effect(changes)
    )


def _last_step(metrics: Path) -> int:
    """0: unknown."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(json.loads(metrics.read_bytes().splitlines()[-1])["step"])
    return 0


def _ranks(degrees: Mapping[str, Any]) -> str:
    return (
        ",".join(f"{name}={degrees[name]}" for name in DEGREES if degrees.get(name, 1) != 1)
        or "one"
    )


def refuse_other(what: str, before: str, now: str, keys: str) -> None:
    if before != now:
        changed_inputs = f"{what} changed since it was saved; restore what {keys} named then"
        raise ConfigError(f"the run cannot go on: {changed_inputs}, or {ANEW}")
