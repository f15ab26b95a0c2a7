"""SIGTERM during training: 143, a checkpoint, no final model, and no process that outlives the run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dovetail.checkpoint.reader import ShardedReader
from tests.commands.program import read_rows, start, write_recipe, write_rows

REWARD = """
import os, pathlib, time

def slow(data_source, solution_str, ground_truth, extra_info):
    pathlib.Path(ground_truth, f"worker-{os.getpid()}").write_text("")
    time.sleep(0.02)
    return float(len(solution_str))
"""


def descendants(pid: int) -> set[int]:
    """Every process below `pid`, by /proc."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = set(), [pid]
    while left:
        children = parents.get(left.pop(), [])
        found |= set(children)
        left += children
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_for_rows(process: subprocess.Popen[str], path: Path, count: int) -> None:
    for _ in range(6000):
        if path.exists() and path.read_text().count("\n") >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} never had {count} rows")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted by /proc")
@pytest.mark.parametrize(("layout", "save_every"), [("tp=1", 0), ("dp=2", 1000)])
def test_sigterm(layout: str, save_every: int, model: Path, tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text(REWARD)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": str(tmp_path)}] * 2)
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "grader:slow"},
        trainer={"steps": 100000, "save_every": save_every},
    )
    process = start("train", recipe, "--layout", layout)
    wait_for_rows(process, tmp_path / "run/metrics.jsonl", 2)
    below = descendants(process.pid)
    assert len(below) == (2 if layout == "tp=1" else 4), "two reward workers, and the ranks where we start them"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (143, "")
    assert "not written: stopped" in out
    steps = len(read_rows(tmp_path / "run/metrics.jsonl"))
    assert not (tmp_path / "run/hf").exists()
    if save_every:
        ShardedReader(tmp_path / f"run/checkpoints/step_{steps:06}").verify()
    else:
        assert not (tmp_path / "run/checkpoints").exists()
    workers = {int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")}
    assert workers
    assert workers <= below
    deadline = time.monotonic() + 20
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, below))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted by /proc")
def test_no_worker_outlives_a_killed_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text(REWARD)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": str(tmp_path)}] * 2)
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "grader:slow"},
        trainer={"steps": 100000},
    )
    process = start("train", recipe)
    wait_for_rows(process, tmp_path / "run/metrics.jsonl", 1)
    below = descendants(process.pid)
    assert below
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    deadline = time.monotonic() + 20
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, below))
