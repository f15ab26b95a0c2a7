"""The saved steps of a run."""

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
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError, DamagedError, listing, quoted
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import replace_file
from dovetail.weights.safe_paths import LEFTOVERS, MANIFEST, contained

T = TypeVar("T")
NONE: Mapping[str, str] = {}
NAME = re.compile(r"step_(\d{6,})\.\w+")
LINK = re.compile(r"step_\d{6,}")
ORDER = "order"
SCORE = "score"
LATEST = "latest"  # for people


@dataclass(frozen=True)
class SavedStep:
    """order: -1 without training state. score: higher is better."""

    path: Path
    step: int
    order: int
    score: float | None


def oldest_of_last(folder: Path, last: int) -> int:
    steps, _ = saved_steps(folder)
    return min(saved.step for saved in [saved for saved in steps if saved.order >= 0][:last])


@dataclass(frozen=True)
class Retention:
    """The `last`, those that `every` divides, and the `best`. 0: none."""

    last: int
    every: int = 0
    best: int = 0

    def keeps(self, steps: Sequence[SavedStep]) -> set[Path]:
        newest_first = sorted(steps, key=lambda saved: saved.order, reverse=True)
        scored = [saved for saved in newest_first if saved.score is not None]
        scored.sort(key=lambda saved: saved.score or 0.0, reverse=True)  # of equals the newest
        chosen = [*newest_first[: max(1, self.last)], *scored[: self.best]]
        chosen += [saved for saved in newest_first if self.every and saved.step % self.every == 0]
        return {saved.path for saved in chosen}


def saved_steps(folder: Path) -> tuple[list[SavedStep], list[str]]:
    """Complete ones, the newest first; problems of others."""
    sound = []
    problems = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                manifest = Manifest.parse(
                    contained(path, MANIFEST).read_bytes(), str(path / MANIFEST)
                )
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                continue
            order, score = (
                (-1, None) if manifest.state is None else map(manifest.state.get, (ORDER, SCORE))
            )
            if type(order) is not int or not isinstance(score, (int, float, type(None))):
                problems.append(
                    f"{path}: its state has the order {quoted(order)} and the score {quoted(score)}"
                )
                continue
            known = score is not None and math.isfinite(score)
            sound.append(SavedStep(path, manifest.step or 0, order, score if known else None))
    return sorted(sound, key=lambda saved: saved.order, reverse=True), problems


def open_newest(
    folder: Path, mesh: Mesh, step: int | None = None, damaged: Mapping[str, str] = NONE
) -> tuple[ShardedReader | None, list[str]]:
    """The newest readable step, or `step`, and problems of those skipped. damaged: name -> problem. Collective."""
    named: list[str] = []
    others: list[int] = []
    problems: list[str] = []
    with agreed(mesh):
        if mesh["world"].rank == 0:
            steps, problems = saved_steps(folder)
            others = sorted({saved.step for saved in steps if saved.order >= 0})
            named = [
                saved.path.name
                for saved in steps
                if step in (None, saved.step) and saved.order >= 0
            ]
            problems += [
                f"{saved.path} holds weights without training state"
                for saved in steps
                if saved.order < 0
            ]
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
        known = (
            f"; it has step {', '.join(map(str, others))}" if others and step not in others else ""
        )
        lacks = f"{folder} has no whole training state of step {step}{known}"
        raise CheckpointError(f"{lacks}\n{listing(problems)}".rstrip())
    if problems:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read; move it away to start anew\n{listing(problems)}"
        )
    return None, []


def from_a_whole_step(folder: Path, attempt: Callable[[Mapping[str, str]], T]) -> T:
    """Repeats `attempt(damaged)` without steps that prove damaged."""
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
    """Files in use are removed later."""
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
    directories = [
        path
        for path in folder.glob("step_*")
        if NAME.fullmatch(path.name) and not path.is_symlink()
    ]
    for path in sorted(directories, key=lambda path: readable.get(path, math.inf), reverse=True):
        if readable.get(path, math.inf) > order:
            move(path)
            _unlink(path)
    for path in [path for path in folder.glob("step_*") if LINK.fullmatch(path.name)]:
        if path.is_dir() and not path.is_symlink():  # `scp -r` copies links as directories
            move(path)
            if named := [step.name for step in kept if step.stem == path.name]:
                path.symlink_to(named[0])
    latest = folder / LATEST
    misplaced = latest.is_dir() and not latest.is_symlink()
    if misplaced:
        move(latest)
    if misplaced or (
        latest.is_file() and not (folder / latest.read_text(errors="replace").strip()).is_dir()
    ):
        replace_file(latest, f"{kept[0].name}\n".encode()) if kept else latest.unlink(
            missing_ok=True
        )


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
