"""The pool of an asynchronous run: the bound on lag, the order of groups, and what a kill leaves."""

import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest

from dovetail.data.rows import batch_rows
from dovetail.errors import MachineError
from dovetail.rollout.feed import Feed
from dovetail.rollout.journal import Answer, FinishedGroup, Journal
from dovetail.rollout.pool import Pool
from tests.unit import pool_loop
from tests.unit.pool_loop import BATCH, STEPS, Checkpoint, Engines, keep, train


def drive(pool: Pool, luck: random.Random, dropping: float, restarts: float) -> tuple[list[list[int]], set[int]]:
    """Groups of all steps, and dropped ones. Samples end in any order, pushes are late, and the run is killed at times."""
    trained: list[list[int]] = []
    versions: dict[int, tuple[int, int]] = {}  # of tokens: oldest and newest
    finished, dropped, running = dict[int, tuple[int, int]](), set[int](), list[int]()
    saved = (0, 0)
    while len(trained) < pool.steps:
        for group in pool.admit():
            running += [group] * pool.samples
        if running and luck.random() < 0.9:  # its first or its last token
            group = running[luck.randrange(min(len(running), 3))]
            oldest, _ = versions.setdefault(group, (pool.version, pool.version))
            versions[group] = oldest, pool.version
            if luck.random() < 0.7:
                running.remove(group)
                if pool.finish(group):
                    finished[group] = versions.pop(group)
                    if luck.random() < dropping:
                        pool.drop(group)
                        dropped.add(group)
                    else:
                        pool.ready(group)
        if pool.version == pool.step and (groups := pool.take()) is not None:
            assert all(len(trained) - pool.max_lag <= finished[group][0] for group in groups)
            assert all(finished[group][1] <= len(trained) for group in groups)
            trained.append(groups)
            if luck.random() < 0.3:
                saved = pool.step, pool.cursor
        elif pool.version < pool.step and luck.random() < 0.5:
            pool.pushed(pool.step)
        if luck.random() < restarts:
            trained, running, versions = trained[: saved[0]], [], {}
            kept = {group: ages for group, ages in finished.items() if group not in dropped}
            pool = Pool(pool.groups_per_step, pool.samples, pool.max_lag, pool.steps)
            assert pool.restore(*saved, kept, dropped) == [group for group in sorted(kept) if group >= saved[1]]
    return trained, dropped


def test_no_lag_beyond_the_bound_and_no_group_left_out() -> None:
    for seed in range(300):
        luck = random.Random(seed)
        pool = Pool(luck.randint(1, 4), luck.randint(1, 3), luck.randint(0, 3), luck.randint(1, 8))
        trained, dropped = drive(pool, luck, luck.choice((0.0, 0.3)), luck.choice((0.0, 0.05)))
        done = [group for groups in trained for group in groups]
        assert done == [group for group in range(done[-1] + 1) if group not in dropped], seed


def test_without_lag_the_order_is_the_synchronous_one() -> None:
    """The rows of every step, and nothing runs while the trainer trains."""
    pool = Pool(3, samples=1, max_lag=0, steps=4)
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
    assert Pool(1, 1, 3, 9).restore(0, 0, finished) == [
        0,
        1,
        2,
        4,
    ]  # 6: version 4 comes after group 3, which runs again
    pool = Pool(1, 1, 1, 9)
    assert pool.restore(0, 0, finished) == [0, 1]  # 2 would have the lag 2, 4 was sampled after it
    assert pool.admit() == [] and pool.take() == [0] and pool.take() == [1]


def test_an_engine_that_holds_old_weights_is_reported(tmp_path: Path) -> None:
    engines = Engines(tmp_path / "log")
    engines.policy = "x"
    feed = Feed(Pool(1, 1, 1, 9), Journal(tmp_path / "pool", ""), engines, pool_loop.reward)

    def step() -> None:
        while feed.take() is None:
            feed.turn()
        feed.pool.pushed(feed.pool.step)

    step()
    step()
    with pytest.raises(
        MachineError, match=r"step 3: group 2 has tokens of versions 0 to 0; expected 1 to 2: an engine"
    ):
        step()


def test_a_saved_group_comes_back_as_it_was(tmp_path: Path) -> None:
    answers = (
        Answer(
            0,
            (5, 6, 7),
            (-0.1, -1e-300, -3.3333333333333335),
            ((4, 0, 2), (5, 2, 3)),
            "length",
            0.1,
            {"a": None, "b": 2.0},
        ),
        Answer(2, (9,), (-0.25,), ((5, 0, 1),), "stop", -1.0),
    )
    journal, group = Journal(tmp_path / "pool", "one"), FinishedGroup(12, answers)
    journal.save(group)
    journal.save(FinishedGroup(13, ()))
    assert group.ages == (4, 5)
    assert journal.load(0) == ({12: group, 13: FinishedGroup(13, ())}, [])
    assert journal.load(13)[0].keys() == {13}
    _, problems = Journal(tmp_path / "pool", "two").load(0)
    assert len(problems) == 2 and "of another run, or of other data or sampling" in problems[0]
    journal.forget(13)
    assert [file.name for file in (tmp_path / "pool").iterdir()] == ["group_000000013.safetensors"]


def test_a_damaged_group_runs_again(tmp_path: Path) -> None:
    """One bit anywhere, or a cut: the file is refused, or what it holds is the same."""
    journal = Journal(tmp_path, "one")
    group = FinishedGroup(3, (Answer(0, (5, 6), (-0.5, -0.25), ((1, 0, 2),), "stop", 1.0, {"a": 1.0}),))
    journal.save(group)
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
            kept = {int(file.name[6:15]) for file in (run / "pool").glob("group_*")} if life else set()
            seconds = luck.uniform(0.0, 0.1) if kills < wanted else 60.0
            ended = live(run, life, seconds)
            log = run / f"submitted-{life}"
            submitted = {int(line) for line in log.read_text().split()} if log.exists() else set()
            assert not submitted & {group for group in kept if group >= saved.cursor}, (
                "a finished group was sampled again"
            )
            if ended:
                break
            kills += 1
        done = [group for groups in Checkpoint.load(run).trained for group in groups]
        expected = [group for group in range(2 * BATCH * STEPS) if keep(FinishedGroup(group, ()))]
        assert done == expected[: BATCH * STEPS]
        runs += 1
