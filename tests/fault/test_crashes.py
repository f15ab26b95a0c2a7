"""Wherever a process dies while it saves, the folder holds the save before or the new one, whole, and nothing less."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from dovetail.checkpoint.retention import saved_steps
from dovetail.errors import MachineError
from tests.helpers.checkpoints import assert_same_tensors, tensors_of, write_tiny
from tests.helpers.crashing import (
    DIED,
    die_at,
    end_all,
    fill_disk_after,
    forked,
    join_group,
    leave_group,
    start_fork,
)
from tests.helpers.harness import Apart
from tests.helpers.saves import Run, recovered
from tests.helpers.training_checkpoint import fill, tiny_engine

GRACE = 0.1  # seconds that the others have when a rank is gone, before they are ended, too
SECONDS = 10.0  # within which an error must reach all ranks
MANY = 2000  # more changes of the disk than any save makes


@dataclass(frozen=True)
class Scene:
    """What was saved before, as (step, order); what is saved when a rank dies; and what may be gone on from then."""

    before: tuple[tuple[int, int], ...]
    save: tuple[int, int]
    keep: int = 10

    @property
    def allowed(self) -> set[tuple[int, int]]:
        return {self.before[-1], self.save}


SCENES = {
    "new": Scene(((1, 1),), (2, 2)),
    "again": Scene(((1, 1), (2, 2), (1, 3)), (2, 4)),
    "retention": Scene(((1, 1), (2, 2)), (3, 3), keep=1),
}


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    apart = Apart()
    yield apart
    apart.end()


def prepare(folder: Path, scene: Scene) -> None:
    run = Run(folder)
    for step, order in scene.before:
        run.save(step, order)


def saving(
    folder: Path,
    store: Path,
    scene: Scene,
    background: bool,
    place: tuple[int, int],
    index: int | None,
) -> None:
    """One rank's life: with `index` it dies at that change of the disk. place: rank and world."""
    rank, world = place
    if world > 1:
        join_group(store, rank, world)
    run = Run(folder, world, keep=scene.keep, background=background)
    if index is not None:
        die_at(index)
    run.save(*scene.save)
    leave_group(store, *place)


def deaths(
    base: Path, scene: Scene, background: bool, world: int, victim: int, indices: Iterator[int]
) -> Counter[tuple[int, int]]:
    """Have the victim die at each index until it lives; how often which save was gone on from."""
    apart_from = partial(prepare, base / "good", scene)
    assert forked(apart_from) == 0
    folders = []
    for index in indices:
        folder = base / f"steps-{index}"
        folders.append(folder)
        shutil.copytree(base / "good", folder, symlinks=True)
        life = partial(saving, folder, base / f"store-{index}", scene, background)
        others = [
            start_fork(partial(life, (rank, world), None))
            for rank in range(world)
            if rank != victim
        ]
        code = forked(partial(life, (victim, world), index))
        assert code in (0, DIED), code
        if others:
            time.sleep(GRACE if code else 0)
            wait_or_end(others, patient=code == 0)
        if code == 0:
            break
    return survivors(folders, scene, base / "told")


def wait_or_end(children: list[int], *, patient: bool) -> None:
    if patient:
        assert {os.waitpid(child, 0)[1] for child in children} <= {0}
    else:
        end_all(children)


def survivors(folders: Sequence[Path], scene: Scene, path: Path) -> Counter[tuple[int, int]]:
    """How often which save was gone on from, by a child, which tells it in a file; it then runs on from there."""
    assert (
        forked(lambda: path.write_text(json.dumps([recovered(folder) for folder in folders]))) == 0
    )
    found = [(step, order) for step, order in json.loads(path.read_text())]
    assert {*found} <= scene.allowed, [*zip(folders, found, strict=True)]
    return Counter(found)


@pytest.mark.parametrize(
    ("name", "background", "stride"),
    [
        ("new", True, 2),
        ("again", False, 3),
        *(pytest.param(n, b, 1, marks=pytest.mark.soak) for n in SCENES for b in (False, True)),
    ],
)
def test_one_process_dies_at_every_change_of_the_disk(
    name: str, background: bool, stride: int, apart: Apart, tmp_path: Path
) -> None:
    """Or at every second or third one, where the same change was seen in another scene."""
    scene = SCENES[name]
    found = apart(deaths, tmp_path, scene, background, 1, 0, range(0, MANY, stride))
    assert found.keys() == scene.allowed
    assert sum(found.values()) > 25 // stride


SOME = [("new", True, 0, 7), ("retention", False, 1, 3)]
ALL = [
    (name, background, victim, 1)
    for name in SCENES
    for background in (False, True)
    for victim in (0, 1)
]


@pytest.mark.parametrize(
    ("name", "background", "victim", "stride"),
    [*SOME, *(pytest.param(*each, marks=pytest.mark.soak) for each in ALL)],
)
def test_either_of_two_ranks_dies_at_every_change_of_the_disk(
    name: str, background: bool, victim: int, stride: int, apart: Apart, tmp_path: Path
) -> None:
    scene = SCENES[name]
    found = apart(deaths, tmp_path, scene, background, 2, victim, range(0, MANY, stride))
    assert found.keys() <= scene.allowed
    assert sum(found.values()) >= 2


def live_or_kill(
    life: Callable[[tuple[int, int], Path], None],
    base: Path,
    world: int,
    rng: random.Random,
    seconds: float | None,
) -> float:
    """Have `life`, called with its place and the file that tells that it has begun, be led by all ranks at once.

    Without `seconds` all come to their end: how long that took. With them one is killed within about that time, and the
    others soon after.
    """
    ready = [base / f"ready-{rank}" for rank in range(world)]
    children = [start_fork(partial(life, (rank, world), ready[rank])) for rank in range(world)]
    while not all(path.exists() for path in ready):
        time.sleep(0.001)
    begun = time.monotonic()
    if seconds is None:
        wait_or_end(children, patient=True)
    else:
        time.sleep(rng.uniform(0, 1.05 * seconds))
        victim = children.pop(rng.randrange(world))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        time.sleep(rng.uniform(0, GRACE))
        wait_or_end(children, patient=False)
    for path in ready:
        path.unlink()
    return time.monotonic() - begun


def killed_at_random(
    base: Path, scene: Scene, background: bool, world: int, rounds: int
) -> Counter[tuple[int, int]]:
    """SIGKILL for one rank at any moment of a save, and for the others soon after."""
    rng = random.Random(f"{base.name}{world}")
    assert forked(partial(prepare, base / "good", scene)) == 0
    folders = []
    seconds: float | None = None
    for turn in range(rounds + 1):
        folder = base / f"steps-{turn}"
        shutil.copytree(base / "good", folder, symlinks=True)
        life = partial(announced, folder, base / f"store-{turn}", scene, background)
        took = live_or_kill(life, base, world, rng, seconds)
        if seconds is None:  # the first one lives, and tells how long a save takes
            seconds = took
        else:
            folders.append(folder)
    return survivors(folders, scene, base / "told")


def announced(
    folder: Path, store: Path, scene: Scene, background: bool, place: tuple[int, int], ready: Path
) -> None:
    if place[1] > 1:
        join_group(store, *place)
    run = Run(folder, place[1], keep=scene.keep, background=background)
    ready.write_text("")
    run.save(*scene.save)
    leave_group(store, *place)


KILLS = [(name, b, w, 17) for name in SCENES for b in (False, True) for w in (2, 4)]


@pytest.mark.parametrize(
    ("name", "background", "world", "rounds"),
    [("again", True, 2, 10), *(pytest.param(*each, marks=pytest.mark.soak) for each in KILLS)],
)
def test_a_random_rank_is_killed_at_a_random_moment(
    name: str, background: bool, world: int, rounds: int, apart: Apart, tmp_path: Path
) -> None:
    found = apart(killed_at_random, tmp_path, SCENES[name], background, world, rounds)
    assert sum(found.values()) == rounds


def exporting(
    source: Path, out: Path, store: Path, place: tuple[int, int], index: int | None
) -> None:
    join_group(store, *place)
    engine = tiny_engine(source)
    if index is not None:
        die_at(index)
    engine.save_pretrained(out)
    leave_group(store, *place)


def export_deaths(base: Path, world: int, victim: int, stride: int) -> int:
    """The final model is there whole or not at all; how often it was not."""
    missing = 0
    expected: Path | None = None
    for index in (MANY, *range(0, MANY, stride)):  # the first one lives, and tells what is expected
        out, store = base / f"hf-{index}", base / f"store-{index}"
        life = partial(exporting, base / "source", out, store)
        others = [
            start_fork(partial(life, (rank, world), None))
            for rank in range(world)
            if rank != victim
        ]
        code = forked(partial(life, (victim, world), index))
        time.sleep(GRACE if code and others else 0)
        wait_or_end(others, patient=code == 0)
        if out.exists():
            expected = expected or out
            assert forked(partial(assert_same_model, out, expected)) == 0, index
        missing += not out.exists()
        if code == 0 and index != MANY:
            break
    return missing


def exporting_anew(
    source: Path, out: Path, store: Path, place: tuple[int, int], ready: Path
) -> None:
    """The model has been trained on since the export before."""
    join_group(store, *place)
    engine = tiny_engine(source)
    fill(engine, 2.0)
    ready.write_text("")
    engine.save_pretrained(out)
    leave_group(store, *place)


def exports_killed_at_random(base: Path, world: int, rounds: int) -> dict[bool, int]:
    """SIGKILL for one rank at any moment of an export, beside one that is there: how often the new one was whole."""
    rng = random.Random(f"hf{world}")
    assert (
        forked(partial(exporting, base / "source", base / "old", base / "store", (0, 1), None)) == 0
    )
    shutil.copytree(base / "old", base / "copy")
    found = {True: 0, False: 0}
    seconds: float | None = None
    for turn in range(rounds + 1):
        out = base / "new" if turn == 0 else base / "hf"
        life = partial(exporting_anew, base / "source", out, base / f"store-{turn}")
        took = live_or_kill(life, base, world, rng, seconds)
        seconds = seconds or took
        if out.exists():
            assert forked(partial(assert_same_model, out, base / "new")) == 0, turn
        assert forked(partial(assert_same_model, base / "old", base / "copy")) == 0, turn
        found[out.exists()] += turn > 0
        shutil.rmtree(base / "hf", ignore_errors=True)
    return found


@pytest.mark.parametrize(
    ("world", "rounds"), [(2, 4), *(pytest.param(w, 100, marks=pytest.mark.soak) for w in (2, 4))]
)
def test_a_random_rank_is_killed_while_the_final_model_is_written(
    world: int, rounds: int, apart: Apart, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "source", "llama")
    found = apart(exports_killed_at_random, tmp_path, world, rounds)
    assert sum(found.values()) == rounds
    if rounds > 50:
        assert all(found.values()), "both outcomes"


def assert_same_model(out: Path, expected: Path) -> None:
    assert_same_tensors(tensors_of(out), tensors_of(expected))
    assert {path.name for path in out.iterdir()} == {path.name for path in expected.iterdir()}


@pytest.mark.parametrize(
    ("world", "victim", "stride"),
    [(1, 0, 5), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, 0, 1), (2, 0, 1)))],
)
def test_the_final_model_is_there_whole_or_not_at_all(
    world: int, victim: int, stride: int, apart: Apart, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "source", "llama")
    assert apart(export_deaths, tmp_path, world, victim, stride) >= 5


def full(folder: Path, store: Path, place: tuple[int, int], background: bool, room: int) -> None:
    """The last rank's disk is full; all hear the same, old saves are whole, and the next one succeeds."""
    rank, world = place
    if world > 1:
        join_group(store, rank, world)
    run = Run(folder, world, background=background)
    run.save(1, 1)
    restore = fill_disk_after(room) if rank == world - 1 else lambda: None
    begun, told = time.monotonic(), ""
    try:
        run.save(2, 2)
    except MachineError as error:
        told = str(error)
    restore()
    assert time.monotonic() - begun < SECONDS
    (folder.parent / f"told-{rank}").write_text(told)
    if told:
        assert "No space left on device" in told
        assert rank or not [*folder.glob(".tmp-*")], "the first rank clears away"
        assert 1 in {saved.step for saved in saved_steps(folder)[0]}
    run.save(3, 3)
    assert saved_steps(folder)[0][0].step == 3
    leave_group(store, *place)


def full_disks(base: Path, world: int, rooms: list[int]) -> int:
    """How many of the saves failed."""
    failed, folders = 0, []
    for room in rooms:
        folder, store = base / f"{room}" / "steps", base / f"store-{room}"
        folder.mkdir(parents=True)
        life = partial(full, folder, store)
        children = [
            start_fork(partial(life, (rank, world), bool(room % 2), room)) for rank in range(world)
        ]
        assert {os.waitpid(child, 0)[1] for child in children} == {0}, room
        told = {(folder.parent / f"told-{rank}").read_text() for rank in range(world)}
        assert len(told) == 1, "the same on all ranks"
        failed += told != {""}
        folders.append(folder)
    survivors(folders, Scene(((3, 3),), (3, 3)), base / "told")
    return failed


@pytest.mark.parametrize(
    ("world", "count"),
    [(1, 20), (2, 5), *(pytest.param(w, 50, marks=pytest.mark.soak) for w in (1, 2, 4))],
)
def test_a_full_disk_on_one_rank_costs_one_save(
    world: int, count: int, apart: Apart, tmp_path: Path
) -> None:
    sizes = (
        [97 * n + n % 3 for n in range(count)]
        if world == 1
        else [3400 // (world * count) * n + n % 3 for n in range(count)]
    )
    failed = apart(full_disks, tmp_path, world, sizes)
    assert failed > count // 4
