"""Ranks that hang in six ways: found within their limit, the odd one named, with the stacks of all."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dovetail.launch import supervisor
from dovetail.launch.progress import LIMITS, read_state
from dovetail.system import children_of
from tests.helpers.forked import popen
from tests.helpers.harness import template
from tests.helpers.processes import all_gone, ranks_of, stopped_in
from tests.helpers.program import here, make_model, start, write_recipe, write_rows

LIMIT = 5.0  # seconds in a phase; no sound one takes so long on a busy machine
SLACK = 10.0  # how much later than its limit a hang may be told
ODD = 1
RANK = """
import os, sys, time, torch
import torch.distributed as dist
from dovetail.launch.rank import RankProcess
me = RankProcess.from_environment()
rank = int(os.environ["RANK"])
with me.watched({{}}):
    dist.init_process_group("gloo")
    for step in range(1, 4):
        me.progress.phase("update", step)
        x = torch.ones(8)
        dist.all_reduce(x)
    odd = rank == {odd}
{body}
    dist.barrier()
    dist.all_reduce(x)
    me.progress.phase("exit")
    dist.barrier()
    os._exit(0)
"""
SUPERVISOR = """
import sys
from pathlib import Path
from dovetail.launch.supervisor import Supervision, run_ranks
from dovetail.launch.progress import LIMITS
limits = {{**LIMITS, "update": {limit}, "exit": {limit}}}
sys.exit(run_ranks([sys.executable, "rank.py"], 3, Supervision(limits=limits, run_dir=Path("run"))))
"""
BODIES = {
    "skips a collective": "    if not odd:\n        dist.all_reduce(x)",
    "wrong shape": "    dist.all_reduce(x if not odd else torch.ones(4096))",
    "wrong order": "    first, second = (dist.barrier, dist.all_reduce) if odd else (dist.all_reduce, dist.barrier)\n"
    "    first(*([] if odd else [x]))\n    second(*([x] if odd else []))",
    "stuck reader": "    if odd:\n        open('pipe').read()\n    dist.all_reduce(x)",
}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="ranks are found by /proc")
@pytest.mark.parametrize(
    "kind",
    [
        "stuck reader",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in BODIES if kind != "stuck reader"),
    ],
)
def test_ranks_that_part_in_a_collective_are_told_apart(kind: str, tmp_path: Path) -> None:
    """A wrong shape or order may also end in an error of the backend, which is told as a death of one of them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "rank.py").write_text(RANK.format(odd=ODD, body=BODIES[kind]))
    (tmp_path / "job.py").write_text(SUPERVISOR.format(limit=LIMIT))
    source = str(Path(__file__).parents[2] / "src")
    env = {
        **os.environ,
        "PYTHONPATH": source,
        "TMPDIR": str(tmp_path / "tmp"),
        "OMP_NUM_THREADS": "1",
    }
    process = popen(template, [sys.executable, "job.py"], cwd=tmp_path, env=env)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    (event,) = [json.loads(row) for row in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert (event["phase"], event["step"]) == ("update", 3)
    if event["kind"] == "death":
        assert kind.startswith("wrong"), err
        return
    assert event["rank"] == ODD, err
    assert f"(limit {LIMIT:g} s)" in err
    assert told_after(err) < LIMIT + SLACK
    for rank in range(3):
        assert f"  rank {rank} (pid " in err
    assert err.count("stack of rank") >= 2
    assert "rank.py" in err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="ranks are found by /proc")
def test_a_rank_that_cannot_be_killed_is_told_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that waits inside a driver: the report of the hang that it caused came only when the driver let it go."""
    ranks = supervisor._Job(tmp_path, LIMITS, supervisor._Stop())
    rank = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    ranks.add(rank)
    monkeypatch.setattr(supervisor, "KILLED_SECONDS", 0.5, raising=False)
    with monkeypatch.context() as patch:
        for name in ("kill", "killpg"):
            patch.setattr(os, name, lambda *_: None)
        kill = threading.Thread(target=ranks.kill, daemon=True)
        kill.start()
        kill.join(20)
        assert not kill.is_alive(), "it waits for what never comes"
    assert capfd.readouterr().err.count(f"not gone after 0.5 s: pid {rank.pid};") == 1
    ranks.kill()
    assert rank.poll() is not None


GRADER = """
import pathlib, time

def endless(data_source, solution_str, ground_truth, extra_info):
    while True:
        pass
"""


@pytest.mark.soak
def test_an_endless_reward_is_found_where_its_own_limit_is_too_long(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "tmp").mkdir()
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}] * 2)
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "grader:endless", "timeout_seconds": 100000},
    )
    argv = ["train", recipe, f"--trainer.timeouts.reward={LIMIT}", "--layout", "dp=2"]
    process = start(*argv, env={"TMPDIR": str(tmp_path / "tmp")})
    while process.poll() is None and not _in_reward(tmp_path / "tmp"):
        time.sleep(0.01)
    below = children_of([process.pid])
    assert len(below) == 6, "two ranks, two reward workers and their keepers"
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert told_after(err) < LIMIT + SLACK
    assert err.splitlines()[-1].startswith("dovetail: rank 0 (")
    assert "in phase reward, step 1: at work, while the others wait for it in a collective: " in err
    assert "rewards/runner.py" in err.splitlines()[-1]
    assert all_gone(below, 5.0)


@pytest.mark.soak
def test_a_rank_of_the_real_command_that_is_stopped_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "c"}] * 2)
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, trainer={"steps": 100000})
    given = [f"trainer.timeouts.{phase}={LIMIT}" for phase in ("update", "optimizer")]
    process = start(
        "train", recipe, *given, "--layout", "dp=2", env={"TMPDIR": str(tmp_path / "tmp")}
    )
    pid = stopped_in(process, ODD, "update", 3, tmp_path / "tmp")
    below = children_of([process.pid])
    stopped = time.monotonic()
    _, err = process.communicate(timeout=200)
    assert time.monotonic() - stopped < LIMIT + SLACK
    assert process.returncode == 1
    assert f"rank {ODD} (pid {pid}): phase update" in err
    assert err.splitlines()[-1].endswith("stopped (SIGSTOP or a debugger)")
    assert all_gone(below, 5.0)


@pytest.mark.soak
def test_a_rank_of_another_launcher_ends_itself(model: Path, tmp_path: Path) -> None:
    """Here one rank alone, whose reward never ends: it names its phase, shows its stack, and leaves no worker."""
    (tmp_path / "grader.py").write_text(GRADER)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}] * 2)
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "grader:endless", "timeout_seconds": 100000},
    )
    process = start("train", recipe, f"trainer.timeouts.reward={LIMIT}")
    while process.poll() is None and not (tmp_path / "run/config.yaml").exists():
        time.sleep(0.05)
    below = children_of([process.pid])
    assert below
    assert not ranks_of(process)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "this process made no progress for " in err
    assert f"in phase reward, step 1 (limit {LIMIT:g} s)" in err
    assert "reward_manager.py" in err
    assert all_gone(below, 5.0)


def told_after(err: str) -> float:
    """After how many seconds in its phase a hang was told."""
    line = next(line for line in err.splitlines() if "no progress for " in line)
    return float(line.partition("no progress for ")[2].split()[0])


def _in_reward(temporary: Path) -> bool:
    states = [read_state(path) for path in temporary.glob("dovetail-watch-*/rank_0.state")]
    return any(state is not None and state.phase == "reward" for state in states)


def test_ranks_wait_for_each_other_as_long_as_any_phase_may_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that is given two hours keeps the other ranks in a collective, which gave up after half an hour."""
    waits: list[Any] = []
    for name in ("init_process_group", "new_group"):
        made = getattr(dist, name)

        def noted(*args: Any, made: Any = made, **options: Any) -> Any:
            waits.append(options.get("timeout"))
            return made(*args, **options)

        monkeypatch.setattr(dist, name, noted)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}])
    recipe = write_recipe(
        tmp_path / "r.yaml", make_model(tmp_path / "model"), rows, algorithm={"name": "grpo"}
    )
    assert here("train", recipe, "trainer.timeouts.reward=7200", "--dry-run").code == 0
    assert len(waits) > 1 and all(
        wait is not None and wait > timedelta(hours=2) for wait in waits
    ), waits
    waits.clear()
    assert here("train", recipe, "--dry-run").code == 0
    assert {
        wait > timedelta(seconds=max(s for s in LIMITS.values() if s < math.inf)) for wait in waits
    } == {True}
