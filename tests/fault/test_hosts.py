"""Two ranks as two hosts, of which one falls silent, is killed, or fails first: the other one ends, and says why."""

import os
import signal
import socket
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail.system import children_of
from tests.helpers.processes import ENDLESS, all_gone, waited
from tests.helpers.program import start, write_recipe, write_rows

SECONDS = (
    60.0  # from the last sign of a host to the end of the others, with the limits that users have
)
HOST = socket.gethostname()
PROGRAM = """
import os, signal, sys, time, types
from dovetail.cli import main
from dovetail.errors import DataError
from dovetail.launch import hosts
hosts.BEAT_SECONDS, hosts.SILENT_SECONDS, hosts.GONE_SECONDS = 0.2, 3.0, 2.0
command = sys.modules["dovetail.cli.score"] = types.ModuleType("dovetail.cli.score")
def run(args, progress):
    import torch.distributed as dist
    rank = dist.get_rank()
    progress.phase("rollout", 3)
{body}
command.run = run
main.main()
"""


def hosts(*argv: object, folder: Path, **options: Any) -> list[subprocess.Popen[str]]:
    """The same command as two ranks, one a host, that meet at a port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    where |= {"MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return [
        start(*argv, env={**where, "RANK": str(rank)}, cwd=folder, **options) for rank in range(2)
    ]


def planted(body: str, folder: Path) -> list[tuple[int, str]]:
    """How two ranks end of which each runs `body`, and what they say."""
    (folder / "program.py").write_text(
        PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    )
    given = ["--model", "m", "--data", "d", "--out", "o", "--device", "cpu", "--layout", "dp=2"]
    ranks = hosts("score", *given, folder=folder, python=["program.py"])
    try:
        said = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, err) for rank, err in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(
    ("fails", "code"),
    [("raise DataError('row 4')", 2), pytest.param("raise KeyError", 1, marks=pytest.mark.soak)],
)
def test_a_rank_that_fails_second_ends_with_an_error_and_in_silence(
    fails: str, code: int, tmp_path: Path
) -> None:
    """Launchers such as Slurm may look at its code alone."""
    second, first = planted(f"if rank == 1:\n    {fails}\ndist.barrier()", tmp_path)
    assert second == (1, "")
    assert first[0] == code
    assert first[1].count("dovetail: ") == 1


@pytest.mark.parametrize(
    ("rank", "number", "told"),
    [
        (
            1,
            "SIGSTOP",
            "gave no sign for 3 s: the host is down, stopped or cut off from the network",
        ),
        pytest.param(
            0, "SIGSTOP", "gave no sign for 3 s: the host is down", marks=pytest.mark.soak
        ),
        pytest.param(0, "SIGKILL", "the process ended", marks=pytest.mark.soak),
        pytest.param(1, "SIGKILL", "the process ended", marks=pytest.mark.soak),
    ],
)
def test_a_lost_host_is_named_and_ends_the_job(
    rank: int, number: str, told: str, tmp_path: Path
) -> None:
    body = f"""
    dist.barrier()
    if rank == {rank}:
        os.kill(os.getpid(), signal.{number})
    dist.barrier()
    """
    ends = planted(body, tmp_path)
    code, err = ends[1 - rank]
    assert code == 1
    assert err.startswith(f"dovetail: host {HOST} (rank {rank})")
    assert told in err
    assert err.endswith(
        f"; the job ends (rank {1 - rank} on {HOST} was in phase rollout, step 3)\n"
    )
    assert err.count("\n") == 1
    assert ends[rank] == (-signal.SIGKILL, ""), "a stopped rank cannot end by itself"


def test_a_rank_that_is_killed_at_once_is_no_defect_of_the_other(tmp_path: Path) -> None:
    body = """
    hosts.SILENT_SECONDS = hosts.GONE_SECONDS = 60.0
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    """
    code, err = planted(body, tmp_path)[0]
    assert code == 1 and err.count("\n") == 1
    assert (
        err.startswith(f"dovetail: host {HOST} (rank 1)")
        or "rank 0: the connection to another rank broke" in err
    )


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", [0.0, 0.13, 0.31, 0.57])
def test_the_real_command_ends_within_a_minute(
    rank: int, moment: float, model: Path, tmp_path: Path
) -> None:
    """A frozen host, in whatever phase it is at that moment of a step, with the limits that users have."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}] * 2)
    algorithm, trainer = (
        {"name": "grpo", "num_mini_batches": 2},
        {"steps": ENDLESS, "save_every": 1, "eval_every": 1},
    )
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, algorithm=algorithm, trainer=trainer)
    ranks = hosts("train", recipe, "--device", "cpu", folder=tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    assert waited(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    time.sleep(moment)
    below = [{process.pid, *children_of([process.pid])} for process in ranks]
    for pid in below[rank]:
        os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    _, err = ranks[1 - rank].communicate(timeout=4 * SECONDS)
    assert time.monotonic() - stopped < SECONDS
    assert ranks[1 - rank].returncode == 1
    assert f"dovetail: host {HOST} (rank {rank}) gave no sign for 3" in err
    assert all_gone(below[1 - rank], 5.0)
    for pid in below[rank]:
        os.kill(pid, signal.SIGCONT)
    ranks[rank].communicate(timeout=SECONDS)
    assert ranks[rank].returncode not in (0, None), "it wakes up alone"
    assert all_gone(below[rank], 5.0)
