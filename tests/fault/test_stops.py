"""SIGTERM and SIGINT at any moment, to the command, to one rank, to all: 143 or 130, whole files, and no process left."""

import contextlib
import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.reader import ShardedReader
from dovetail.launch.progress import Phase
from dovetail.system import children_of
from tests.helpers.processes import (
    AT_REST,
    AT_WORK,
    GRADER,
    SECONDS,
    all_gone,
    ranks_of,
    rl_run,
    state_of,
    waited,
)
from tests.helpers.program import read_rows

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="ranks are found by /proc"
)

ONCE: tuple[Phase, ...] = ("init", "load")
OFTEN: dict[str, Any] = {"save_every": 3, "eval_every": 2}
IN_SHORT: tuple[tuple[str, Phase, int], ...] = (("rank", "update", 15),)
MORE = (
    ("all", "rollout", 15),
    ("rank", "load", 15),
    ("command", "load", 15),
)  # test_signals stops the command, too
PHASES: tuple[Phase, ...] = (
    "init",
    "load",
    "push",
    "rollout",
    "reward",
    "score",
    "update",
    "optimizer",
    "save",
    "eval",
)
DRAW = random.Random(0)
AT_LENGTH = [
    (
        DRAW.choice(["command", "rank", "all"]),
        DRAW.choice(PHASES),
        DRAW.choice([signal.SIGTERM, signal.SIGTERM, 2]),
    )
    for _ in range(96)
]


def receivers(process: subprocess.Popen[str], target: str, rank: int) -> list[int]:
    """Who gets the signal. A group of processes gets it together, as from a batch system or a terminal."""
    ranks = ranks_of(process)
    return {"command": [process.pid], "rank": [ranks[rank]], "all": [process.pid, *ranks.values()]}[
        target
    ]


@pytest.mark.parametrize(
    ("target", "phase", "number"),
    [*IN_SHORT, *(pytest.param(*case, marks=pytest.mark.soak) for case in [*MORE, *AT_LENGTH])],
)
def test_a_stop_at_any_moment_is_clean(
    target: str, phase: Phase, number: int, model: Path, tmp_path: Path
) -> None:
    draw = random.Random(f"{target}{phase}{tmp_path.name}")
    process, rank = rl_run(model, tmp_path, "--layout", "dp=2", **OFTEN), draw.randrange(2)
    for came, every in ((_tells, AT_REST), (partial(_came_to, phase), AT_WORK)):
        has_come = partial(came, rank, tmp_path / "tmp")
        assert waited(lambda there=has_come: process.poll() is not None or there(), every=every)  # type: ignore[misc]
    time.sleep(draw.random() * 0.1)
    assert waited(lambda: len(ranks_of(process)) == 2)
    below = children_of([process.pid])
    for pid in receivers(process, target, rank):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (143 if number == signal.SIGTERM else 130, "")
    assert all_gone(below, SECONDS)
    assert list((tmp_path / "tmp").iterdir()) == []
    metrics = tmp_path / "run/metrics.jsonl"
    steps = len(read_rows(metrics)) if metrics.exists() else 0
    if steps:
        ShardedReader(tmp_path / f"run/checkpoints/step_{steps:06}").verify()
    assert not [path.name for path in (tmp_path / "run/checkpoints").glob(".*")], (
        "nothing half-written"
    )


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp=1", "dp=2"])
def test_a_second_signal_does_not_wait_for_a_main_thread_that_is_stuck(
    layout: str, model: Path, tmp_path: Path
) -> None:
    stuck = GRADER.replace(
        "time.sleep(0.02)", f"open({str(tmp_path / 'called')!r}, 'w'); time.sleep(500)"
    )
    process = rl_run(model, tmp_path, "--layout", layout, grader=stuck, **OFTEN)
    assert waited(lambda: (tmp_path / "called").exists())
    below = children_of([process.pid])
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None, "it waits for the step to end"
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - asked < 2.5
    assert (process.returncode, err) == (143, "")
    assert all_gone(below, 20.0)


def _tells(rank: int, temporary: Path) -> bool:
    return state_of(rank, temporary) is not None


def _came_to(phase: Phase, rank: int, temporary: Path) -> bool:
    """Whether a rank is in that phase; one that comes only once may have passed unseen on a busy machine."""
    state = state_of(rank, temporary)
    return state is not None and (
        state.phase == phase or (phase in ONCE and state.phase not in ONCE)
    )
