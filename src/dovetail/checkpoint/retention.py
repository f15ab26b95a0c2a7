"""The saved steps of a run: which there are, which are kept, and which one a run resumes."""

import gc
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dovetail.checkpoint.manifest import Manifest
from dovetail.checkpoint.manifest_body import STEP
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError, DamagedError, listing, quoted
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import replace_file
from dovetail.weights.safe_paths import LEFTOVERS, MANIFEST, contained

T = TypeVar("T")
NONE: Mapping[str, str] = {}
LINK = re.compile(r"step_\d{6,}")
ORDER = "order"
SCORE = "score"
LATEST = "latest"  # for people


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run. order: -1 without training state. score: higher is better."""

    path: Path
    step: int
    order: int
    score: float | None


def oldest_of_last(folder: Path, last: int) -> int:
    """Return the oldest step of the `last` saves."""
    steps, _ = saved_steps(folder)
    whole = [saved.step for saved in steps if saved.order >= 0]
    return min(whole[:last])


@dataclass(frozen=True)
class Retention:
    """Which steps are kept: the `last`, those that `every` divides, and the `best`. 0: none."""

    last: int
    every: int = 0
    best: int = 0

    def keeps(self, steps: Sequence[SavedStep]) -> set[Path]:
        newest_first = sorted(steps, key=lambda saved: saved.order, reverse=True)
        scored = [saved for saved in newest_first if saved.score is not None]
        scored.sort(key=lambda saved: saved.score or 0.0, reverse=True)  # of equals the newest
        chosen = newest_first[: max(1, self.last)] + scored[: self.best]
        if self.every:
            chosen += [saved for saved in newest_first if saved.step % self.every == 0]
        return {saved.path for saved in chosen}


def saved_steps(folder: Path) -> tuple[list[SavedStep], list[str]]:
    """Return complete steps, the newest first, and the problems of others."""
    steps = []
    problems = []
    for path in sorted(folder.glob("step_*")):
        if not STEP.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
            continue
        try:
            steps.append(_saved_step(path))
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    steps.sort(key=lambda saved: saved.order, reverse=True)
    return steps, problems


def _saved_step(path: Path) -> SavedStep:
    content = contained(path, MANIFEST).read_bytes()
    manifest = Manifest.parse(content, str(path / MANIFEST))
    step = manifest.step or 0
    if manifest.state is None:
        return SavedStep(path, step, -1, None)
    order = manifest.state.get(ORDER)
    score = manifest.state.get(SCORE)
    if type(order) is not int or not isinstance(score, (int, float, type(None))):
        raise CheckpointError(
            f"{path}: its state has the order {quoted(order)} and the score {quoted(score)}"
        )
    known = score is not None and math.isfinite(score)
    return SavedStep(path, step, order, score if known else None)


def open_newest(
    folder: Path, mesh: Mesh, step: int | None = None, damaged: Mapping[str, str] = NONE
) -> tuple[ShardedReader | None, list[str]]:
    """Return the newest readable step, or `step`, and the problems of those skipped.

    damaged: name -> problem. CheckpointError. Collective.
    """
    named = []
    others = []
    problems: list[str] = []
    with agreed(mesh):
        if mesh["world"].rank == 0:
            steps, problems = saved_steps(folder)
            for saved in steps:
                if saved.order < 0:
                    problems.append(f"{saved.path} holds weights without training state")
                    continue
                others.append(saved.step)
                if step in (None, saved.step):
                    named.append(saved.path.name)
    named, others, problems = of_first([named, others, problems], mesh)
    for name in named:
        try:
            if name not in damaged:
                with agreed(mesh):
                    return ShardedReader(folder / name), problems
            problems.append(damaged[name])
        except CheckpointError as error:
            problems.append(str(error))
    if step is not None:
        missing = f"{folder} has no whole training state of step {step}"
        if others and step not in others:
            known = ", ".join(map(str, sorted({*others})))
            missing += f"; it has step {known}"
        raise CheckpointError(f"{missing}\n{listing(problems)}".rstrip())
    if problems:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read; move it away to start "
            f"anew\n{listing(problems)}"
        )
    return None, []


def from_a_whole_step(folder: Path, attempt: Callable[[Mapping[str, str]], T]) -> T:
    """Return `attempt(damaged)`, repeated without steps that prove damaged."""
    damaged: dict[str, str] = {}
    while True:
        try:
            return attempt(damaged)
        except DamagedError as error:
            if error.path.parent != folder or error.path.name in damaged:
                raise
            damaged[error.path.name] = str(error)
        gc.collect()  # the engine has reference cycles


def prune(folder: Path, retention: Retention) -> None:
    """Remove steps that are not kept; files in use are removed later."""
    steps, _ = saved_steps(folder)
    kept = retention.keeps(steps)
    for saved in steps:
        if saved.path not in kept:
            _unlink(saved.path)
            with suppress(FileNotFoundError):  # another process was faster
                saved.path.rename(saved.path.with_name(f".trash-{saved.path.name}"))
    for trash in folder.glob(".trash-*"):
        shutil.rmtree(trash, ignore_errors=True)


def set_aside(folder: Path, order: int, aside: Path) -> None:
    """Move steps after the `order`-th save, and unreadable ones, to `aside`, the newest first.

    Also directories in place of links: a save could not replace them.
    """

    def move(path: Path) -> None:
        aside.mkdir(parents=True, exist_ok=True)
        path.rename(aside / path.name)

    steps, _ = saved_steps(folder)
    readable = {saved.path: saved.order for saved in steps}
    kept = [saved.path for saved in steps if saved.order <= order]
    later = []
    for path in folder.glob("step_*"):
        order_of_path = readable.get(path, math.inf)
        if STEP.fullmatch(path.name) and not path.is_symlink() and order_of_path > order:
            later.append((order_of_path, path))
    for _, path in sorted(later, reverse=True):
        move(path)
        _unlink(path)
    for path in [path for path in folder.glob("step_*") if LINK.fullmatch(path.name)]:
        if path.is_dir() and not path.is_symlink():  # `scp -r` copies links as directories
            move(path)
            targets = [step.name for step in kept if step.stem == path.name]
            if targets:
                path.symlink_to(targets[0])
    _correct_latest(folder, kept, move)


def _correct_latest(folder: Path, kept: Sequence[Path], move: Callable[[Path], None]) -> None:
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():
        move(latest)
    elif not latest.is_file() or (folder / latest.read_text(errors="replace").strip()).is_dir():
        return
    if kept:
        replace_file(latest, f"{kept[0].name}\n".encode())
    else:
        latest.unlink(missing_ok=True)


def _unlink(path: Path) -> None:
    link = path.with_name(path.name.partition(".")[0])
    if link.is_symlink() and link.readlink().name == path.name:
        link.unlink()


def clear_debris(folder: Path) -> None:
    """Remove what interrupted saves left. Only for the run that writes to `folder`."""
    for link in folder.glob("step_*"):
        if link.is_symlink() and not link.exists():
            link.unlink()
    for pattern in LEFTOVERS:
        for path in folder.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # may be in use
            else:
                path.unlink()
