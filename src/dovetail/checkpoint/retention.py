"""The saved steps of a run: which are there, which one to go on from, and which stay.

A step's directory is there complete or not at all; its manifest says in which order the run saved it, so a run that
went back to an older step and on from there finds its own way again. Only manifests are trusted, not names or links.
"""

import gc
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from dovetail.checkpoint.manifest import Manifest
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError, DamagedError, listing, quoted
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import replace_file
from dovetail.weights.safe_paths import MANIFEST, contained

T = TypeVar("T")
NONE: Mapping[str, str] = MappingProxyType({})
NAME = re.compile(r"step_(\d{6,})\.\w+")
LINK = re.compile(r"step_\d{6,}")
ORDER, SCORE = "order", "score"  # keys of a manifest's state: the how-manieth save of the run, and how good it is
LATEST = "latest"  # names the newest step's directory, for people and scripts; readers go by the manifests
LEFTOVERS = (".tmp-*", ".trash-*")  # what a save or a removal leaves that did not come to its end


@dataclass(frozen=True)
class SavedStep:
    """A complete step. `order` is -1 where there is no training state; `score`: higher is better, None is not known."""

    path: Path
    step: int
    order: int
    score: float | None


@dataclass(frozen=True)
class Retention:
    """Which steps stay: the `last` ones, every one that `every` divides, and the `best` ones. 0: none for that."""

    last: int
    every: int = 0
    best: int = 0

    def keeps(self, steps: Sequence[SavedStep]) -> set[Path]:
        """The directories that stay."""
        newest_first = sorted(steps, key=lambda saved: saved.order, reverse=True)
        scored = [saved for saved in newest_first if saved.score is not None]
        scored.sort(key=lambda saved: saved.score or 0.0, reverse=True)  # stable: of equals the newest
        chosen = [*newest_first[: max(1, self.last)], *scored[: self.best]]
        chosen += [saved for saved in newest_first if self.every and saved.step % self.every == 0]
        return {saved.path for saved in chosen}


def saved_steps(folder: Path) -> tuple[list[SavedStep], list[str]]:
    """The steps in `folder` that have a sound manifest, the newest first, and what is wrong with the others."""
    found, problems = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                manifest = Manifest.parse(contained(path, MANIFEST).read_bytes(), str(path / MANIFEST))
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                continue
            order, score = (-1, None) if manifest.state is None else map(manifest.state.get, (ORDER, SCORE))
            if type(order) is not int or not isinstance(score, (int, float, type(None))):
                problems.append(
                    f"{path}: its training state has the order {quoted(order)} and the score {quoted(score)}"
                )
                continue
            known = score is not None and math.isfinite(score)
            found.append(SavedStep(path, manifest.step or 0, order, score if known else None))
    return sorted(found, key=lambda saved: saved.order, reverse=True), problems


def open_newest(
    folder: Path, mesh: Mesh, step: int | None = None, damaged: Mapping[str, str] = NONE
) -> tuple[ShardedReader | None, list[str]]:
    """The newest step, as far as its manifest and headers tell, and what is wrong with those passed over. Collective.

    None: there is no step at all. With `step`, exactly that one. `damaged`: what is known of the data of steps, by the
    names of their directories. Raises where there are steps and none can be read.
    """
    named: list[str] = []
    others: list[int] = []
    problems: list[str] = []
    with agreed(mesh):
        if mesh["world"].rank == 0:
            steps, problems = saved_steps(folder)
            others = sorted({saved.step for saved in steps if saved.order >= 0})
            named = [saved.path.name for saved in steps if step in (None, saved.step) and saved.order >= 0]
            problems += [f"{saved.path} holds weights without training state" for saved in steps if saved.order < 0]
    told = json.dumps([named, others, problems])
    named, others, problems = json.loads(gather_text(told, mesh["world"], mesh.device)[0])
    for name in named:
        try:
            if name not in damaged:
                return _opened(folder / name, mesh), problems
            problems.append(damaged[name])
        except CheckpointError as error:
            problems.append(str(error))
    if step is not None:
        there = f"; it has step {', '.join(map(str, others))}" if others and step not in others else ""
        raise CheckpointError(
            f"{folder} has no whole training state of step {step}{there}\n{listing(problems)}".rstrip()
        )
    if problems:
        raise CheckpointError(f"no checkpoint in {folder} can be read; move it away to start anew\n{listing(problems)}")
    return None, []


def _opened(path: Path, mesh: Mesh) -> ShardedReader:
    reader: ShardedReader | None = None
    with agreed(mesh):
        reader = ShardedReader(path)
    assert reader is not None
    return reader


def from_a_whole_step(folder: Path, attempt: Callable[[Mapping[str, str]], T]) -> T:
    """The result of `attempt`, which reads a step of `folder` and is begun again, without that one, where it was damaged.

    `attempt` is given what is known to be damaged, as `open_newest` takes it.
    """
    damaged: dict[str, str] = {}
    while True:
        try:
            return attempt(damaged)
        except DamagedError as error:
            if error.path.parent != folder or error.path.name in damaged:
                raise
            damaged[error.path.name] = str(error)
        gc.collect()  # what was filled in vain is made of cycles, and may be most of the memory


def prune(folder: Path, retention: Retention) -> None:
    """Remove the steps that `retention` does not keep. Each is first renamed, so none is ever half there.

    What others keep in use, such as a reader of the same files over NFS, goes when a later step is saved: that it is still
    there is no failure of the save.
    """
    steps, _ = saved_steps(folder)
    kept = retention.keeps(steps)
    for saved in steps:
        if saved.path not in kept:
            _unlink(saved.path)
            with suppress(FileNotFoundError):  # somebody else was faster
                saved.path.rename(saved.path.with_name(f".trash-{saved.path.name}"))
    for trash in folder.glob(".trash-*"):
        shutil.rmtree(trash, ignore_errors=True)


def set_aside(folder: Path, order: int, aside: Path) -> None:
    """Move the steps that were saved after the `order`-th save, or cannot be read, to `aside`, the newest first.

    So it does with directories that lie where links and the file `latest` belong, which a save could not replace.
    """
    steps, _ = saved_steps(folder)
    readable = {saved.path: saved.order for saved in steps}
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and not path.is_symlink()]
    for path in sorted(found, key=lambda path: readable.get(path, math.inf), reverse=True):
        if readable.get(path, math.inf) > order:
            aside.mkdir(parents=True, exist_ok=True)
            path.rename(aside / path.name)
            _unlink(path)
    for path in [path for path in folder.glob("step_*") if LINK.fullmatch(path.name)]:
        if path.is_dir() and not path.is_symlink():  # whoever copied the run, such as `scp -r`, followed its links
            aside.mkdir(parents=True, exist_ok=True)
            path.rename(aside / path.name)
            named = [saved.path.name for saved in steps if saved.order <= order and saved.path.stem == path.name]
            if named:
                path.symlink_to(named[0])
    latest = folder / LATEST
    misplaced = latest.is_dir() and not latest.is_symlink()
    if misplaced:
        aside.mkdir(parents=True, exist_ok=True)
        latest.rename(aside / LATEST)
    if misplaced or (latest.is_file() and not (folder / latest.read_text(errors="replace").strip()).is_dir()):
        left = [saved.path.name for saved in steps if saved.order <= order]
        replace_file(latest, f"{left[0]}\n".encode()) if left else latest.unlink(missing_ok=True)


def _unlink(path: Path) -> None:
    """Remove the link that names a step's directory, where it names this one."""
    link = path.with_name(path.name.partition(".")[0])
    if link.is_symlink() and link.readlink().name == path.name:
        link.unlink()


def clear_debris(folder: Path) -> None:
    """Remove what interrupted saves and removals left behind. Only for the one run that writes to `folder`."""
    for link in folder.glob("step_*"):
        if link.is_symlink() and not link.exists():
            link.unlink()
    for pattern in LEFTOVERS:
        for path in folder.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # others may use it still
            else:
                path.unlink()
