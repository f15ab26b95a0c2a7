"""SIGTERM or Ctrl-C in training: 143 or 130, a checkpoint that is named, no final model, and no process left."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from dovetail.checkpoint.reader import ShardedReader
from dovetail.system import children_of
from tests.helpers.processes import SECONDS, all_gone, rl_run, waited
from tests.helpers.program import read_rows

REWARD = """
import os, pathlib, time

def slow(data_source, solution_str, ground_truth, extra_info):
    pathlib.Path(ground_truth, f"worker-{os.getpid()}").write_text("")
    time.sleep(0.02)
    return float(len(solution_str))
"""


def trained(process: subprocess.Popen[str], path: Path, count: int) -> bool:
    """Whether the run has come to that many rows."""
    assert waited(
        lambda: (
            process.poll() is not None or (path.exists() and path.read_text().count("\n") >= count)
        )
    )
    return process.poll() is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted by /proc")
@pytest.mark.parametrize(
    ("layout", "save_every", "number"),
    [
        ("dp=2", 0, signal.SIGINT),
        pytest.param("tp=1", 1000, signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_run_names_its_checkpoint(
    layout: str, save_every: int, number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    flags = ["--layout", layout]
    process = rl_run(
        model, tmp_path, *flags, grader=REWARD, answer=str(tmp_path), save_every=save_every
    )
    assert trained(process, tmp_path / "run/metrics.jsonl", 2)
    below = children_of([process.pid])
    assert len(below) == (4 if layout == "tp=1" else 6), (
        "two reward workers, their keepers, and the ranks where we start them"
    )
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130 if number == signal.SIGINT else 143, "")
    steps = len(read_rows(tmp_path / "run/metrics.jsonl"))
    assert "not written: stopped" in out
    assert out.endswith(f"checkpoint         {tmp_path}/run/checkpoints/step_{steps:06}\n")
    assert not (tmp_path / "run/hf").exists()
    ShardedReader(tmp_path / f"run/checkpoints/step_{steps:06}").verify()
    workers = {int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")}
    assert workers & below  # the others tried the reward before ranks started
    assert all_gone(workers | below, SECONDS)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted by /proc")
def test_no_worker_outlives_a_killed_run(model: Path, tmp_path: Path) -> None:
    process = rl_run(model, tmp_path, grader=REWARD, answer=str(tmp_path))
    assert trained(process, tmp_path / "run/metrics.jsonl", 1)
    below = children_of([process.pid])
    assert below
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert all_gone(below, SECONDS)
