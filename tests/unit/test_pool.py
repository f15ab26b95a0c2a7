"""The pool of an asynchronous run: the bound on lag, the order of groups, and what a kill leaves."""

import asyncio
import os
import random
import signal
import time
import traceback
from functools import partial
from pathlib import Path

import pytest

from dovetail.data.rows import batch_rows
from dovetail.errors import MachineError
from dovetail.rl.asynchronous.buffer import RolloutBuffer
from dovetail.rl.asynchronous.checkpoint import RolloutCheckpoint, versions_of
from dovetail.rl.asynchronous.staleness import StalenessController
from dovetail.sampler.turn import GenerationRequest, Generator, RolloutId, Turn
from tests.helpers.pool_loop import BATCH, STEPS, Checkpoint, Engines, requests_of_step, train


class Refusing:
    """A server that is gone."""

    async def generate(self, request: GenerationRequest) -> Turn:
        await asyncio.sleep(0.05)
        raise MachineError("no engine is left")


def buffer(folder: Path, generator: Generator, *, max_lag: int) -> RolloutBuffer:
    """Of nine steps of one sample."""
    controller = StalenessController(1, 1, max_lag, 9)
    requests = partial(requests_of_step, groups=1, samples=1)
    return RolloutBuffer(controller, RolloutCheckpoint(folder, ""), generator, requests)


def drive(pool: StalenessController, luck: random.Random, restarts: float) -> list[list[int]]:
    """Groups of all steps. Samples end in any order, pushes are late, and the run is killed at times."""
    trained: list[list[int]] = []
    versions: dict[int, tuple[int, int]] = {}  # of tokens: oldest and newest
    finished, running, saved = dict[int, tuple[int, int]](), list[int](), 0
    while len(trained) < pool.steps:
        admitted = pool.admit()
        assert not finished.keys() & admitted, "a finished group is sampled again"
        running += [group for group in admitted for _ in range(pool.samples)]
        if running and luck.random() < 0.9:  # its first or its last token
            group = luck.choice(running[: pool.groups_per_step * pool.samples + 2])
            oldest, _ = versions.setdefault(group, (pool.version, pool.version))
            versions[group] = oldest, pool.version
            if luck.random() < 0.7:
                running.remove(group)
                if pool.finish(group):
                    finished[group] = versions.pop(group)
                    pool.ready(group)
        if pool.version == pool.step and (groups := pool.take()) is not None:
            assert all(len(trained) - pool.max_lag <= finished[group][0] for group in groups)
            assert all(finished[group][1] <= len(trained) for group in groups)
            trained.append(groups)
            saved = pool.step if luck.random() < 0.3 else saved
        elif pool.version < pool.step and luck.random() < 0.5:
            pool.pushed(pool.step)
        if luck.random() < restarts:
            trained, running, versions = trained[:saved], [], {}
            pool = StalenessController(pool.groups_per_step, pool.samples, pool.max_lag, pool.steps)
            assert pool.restore(saved, finished) == [
                group for group in sorted(finished) if group >= pool.first
            ]
    return trained


def test_no_lag_beyond_the_bound_and_no_group_left_out() -> None:
    for seed in range(300):
        luck = random.Random(seed)
        pool = StalenessController(
            luck.randint(1, 4), luck.randint(1, 3), luck.randint(0, 3), luck.randint(1, 8)
        )
        trained = drive(pool, luck, luck.choice((0.0, 0.05)))
        assert [group for groups in trained for group in groups] == list(
            range(pool.steps * pool.groups_per_step)
        ), seed


def test_without_lag_the_order_is_the_synchronous_one() -> None:
    """The rows of every step, and nothing runs while the trainer trains."""
    pool = StalenessController(3, samples=1, max_lag=0, steps=4)
    stream = batch_rows(5, 12, seed=7, start=0)
    for step in range(4):
        admitted = pool.admit()
        assert [stream[group] for group in admitted] == batch_rows(5, 3, seed=7, start=3 * step)
        for group in reversed(admitted):
            assert pool.take() is None and pool.finish(group)
            pool.ready(group)
        assert pool.take() == admitted and pool.admit() == []
        pool.pushed(step + 1)
    assert pool.admit() == []


def test_a_smaller_bound_samples_too_old_groups_anew() -> None:
    finished = {0: (0, 0), 1: (0, 1), 2: (0, 2), 4: (1, 2), 6: (2, 4)}
    kept = StalenessController(1, 1, 9, 9).restore(0, finished)
    assert kept == [0, 1, 2, 4], "6 has tokens of version 4, and group 3 runs again"
    pool = StalenessController(1, 1, 1, 9)
    assert pool.restore(0, finished) == [0, 1]  # 2 would have the lag 2, 4 was sampled after it
    assert pool.admit() == [] and pool.take() == [0] and pool.take() == [1]
    pool.pushed(1)
    assert pool.admit() == [2]


def test_an_engine_that_holds_old_weights_is_reported(tmp_path: Path) -> None:
    engines = Engines(tmp_path / "log", groups_per_step=1)
    feed = buffer(tmp_path / "pool", engines, max_lag=1)
    for step in range(2):
        feed.pushed(step)
        feed.take()
    feed.pushed(2)
    with pytest.raises(
        MachineError,
        match=r"step 3: group 2 has tokens of versions 0 to 0; expected 1 to 2: an engine",
    ):
        feed.take()


@pytest.mark.parametrize("repeats", [True, False])
def test_groups_of_policies_that_are_not_made_again_are_lost(repeats: bool, tmp_path: Path) -> None:
    """Also on disk: a later start, which has the policy of their version again, must not meet them."""
    journal = RolloutCheckpoint(tmp_path, "")
    for group, version in ((4, 3), (5, 4), (6, 5), (7, 4)):
        spans = ((3, 0, 1), (version, 1, 2))
        turn = Turn(RolloutId(group, 0, 0), (5, 6), (-0.5, -0.25), "stop", versions=spans)
        journal.save(group, [turn])
    feed = buffer(tmp_path, Refusing(), max_lag=4)
    problems = feed.resume(4, repeats=repeats)
    kept = {4, 5, 6, 7} if repeats else {4, 5, 7}
    assert {*journal.load(0)[0]} == kept == {*feed.controller.groups}
    assert ("1 groups" in str(problems)) is not repeats
    feed.close()


def test_what_an_engine_raises_is_raised_where_the_trainer_waits(tmp_path: Path) -> None:
    feed = buffer(tmp_path / "pool", Refusing(), max_lag=0)
    feed.pushed(0)
    with pytest.raises(MachineError, match="no engine is left"):
        feed.take()


def test_a_saved_group_comes_back_as_it_was(tmp_path: Path) -> None:
    group = [
        Turn(
            RolloutId(3, 7, 0),
            (5, 6, 7),
            (-0.1, -1e-300, -3.3333333333333335),
            "length",
            versions=((4, 0, 2), (5, 2, 3)),
        ),
        Turn(RolloutId(3, 7, 2), (9,), (-0.25,), "stop", versions=((5, 0, 1),)),
    ]
    journal = RolloutCheckpoint(tmp_path / "pool", "one")
    journal.save(12, group)
    journal.save(13, group[1:])
    (tmp_path / "pool" / ".tmp-group_000000014.safetensors-0").write_text("cut")
    assert versions_of(group) == (4, 5)
    assert journal.load(0) == ({12: group, 13: group[1:]}, [])
    assert journal.load(13)[0].keys() == {13}
    _, problems = RolloutCheckpoint(tmp_path / "pool", "two").load(0)
    assert (
        len(problems) == 2
        and "of another model, of other data, or of other sampling" in problems[0]
    )
    journal.forget(13)
    assert [file.name for file in (tmp_path / "pool").iterdir()] == ["group_000000013.safetensors"]
    journal.save(12, group)
    journal.drop(13, ())
    assert [file.name for file in (tmp_path / "pool").iterdir()] == ["group_000000012.safetensors"]


def test_a_damaged_group_runs_again(tmp_path: Path) -> None:
    """One bit anywhere, or a cut: the file is refused, or what it holds is the same."""
    journal = RolloutCheckpoint(tmp_path, "one")
    group = [Turn(RolloutId(1, 0, 0), (5, 6), (-0.5, -0.25), "stop", versions=((1, 0, 2),))]
    journal.save(3, group)
    (file,) = tmp_path.iterdir()
    whole, refused = file.read_bytes(), 0
    places = random.Random(0).sample(range(len(whole)), 100)
    for at in places:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        found, problems = journal.load(0)
        assert found == {3: group} or (found == {} and str(file) in problems[0]), at
        refused += not found
    assert refused > 0.8 * len(places)
    for end in range(0, len(whole), 97):
        file.write_bytes(whole[:end])
        assert journal.load(0)[0] == {}


def live(run: Path, life: int, seconds: float) -> bool:
    """One start of the run, killed after so long. Whether it has ended by itself."""
    if (child := os.fork()) == 0:
        try:
            train(run, life)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    end, ended = time.monotonic() + seconds, (0, 0)
    while ended == (0, 0) and time.monotonic() < end:
        time.sleep(0.002)
        ended = os.waitpid(child, os.WNOHANG)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(ended[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.parametrize("wanted", [6, pytest.param(50, marks=pytest.mark.soak)])
def test_kills_lose_no_finished_group_and_train_none_twice(wanted: int, tmp_path: Path) -> None:
    luck, kills, runs, seconds = random.Random(wanted), 0, 0, 0.0
    while kills < wanted or seconds < 1:
        run = tmp_path / str(runs)
        run.mkdir()
        for life in range(1000):
            saved = Checkpoint.load(run)
            kept = (
                {int(file.name[6:15]) for file in (run / "pool").glob("group_*")} if life else set()
            )
            seconds = luck.uniform(0.0, 0.1) if kills < wanted else 60.0
            ended = live(run, life, seconds)
            log = run / f"submitted-{life}"
            submitted = {int(line) for line in log.read_text().split()} if log.exists() else set()
            trained = len(saved.trained) * BATCH
            assert not submitted & {group for group in kept if group >= trained}, (
                "a finished group was sampled again"
            )
            if ended:
                break
            kills += 1
        assert [group for groups in Checkpoint.load(run).trained for group in groups] == list(
            range(BATCH * STEPS)
        )
        runs += 1
