"""Ranks under torchrun end with its agent, come back after restarts, and meet in bounded time."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public

from dovetail.system import children_of
from tests.helpers.forked import popen
from tests.helpers.harness import template
from tests.helpers.processes import GRADER, SECONDS, all_gone, ranks_of, waited
from tests.helpers.program import read_rows, start, write_recipe, write_rows

HOST = socket.gethostname()
TORCHRUN = "from torch.distributed.run import main\nmain()\n"
SCORE = ["score", "--model", "m", "--data", "d", "--out", "o", "--device", "cpu"]
# `python -m dovetail` whose `score` is planted; `early` runs before its ranks meet.
HELPERS = """
import ctypes, os, signal, sys, time, types
from pathlib import Path
from dovetail.cli import main
from dovetail.launch import rank as process, supervisor
def tell(name, text):
    Path(f"{name}.part").write_text(str(text))
    Path(f"{name}.part").rename(name)
"""
PROGRAM = """
{early}
command = sys.modules["dovetail.cli.score"] = types.ModuleType("dovetail.cli.score")
def run(args, progress):
    import torch.distributed as dist
    rank = dist.get_rank()
{body}
command.run = run
main.main()
"""
AGENT = """
import os, subprocess, sys
env = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
command = [sys.executable, "program.py", *sys.argv[1:]]
subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True).wait()
"""
STORE = """
import time
from pathlib import Path
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
Path("part").write_text(str(store.port))
Path("part").rename("port")
time.sleep(600)
"""


def told(file: Path) -> str:
    """What a program wrote to a file, once it is there."""
    assert waited(file.exists), f"{file.name} was not written"
    return file.read_text()


def write_program(folder: Path, body: str = "pass", early: str = "") -> None:
    body = textwrap.indent(textwrap.dedent(body), "    ")
    program = PROGRAM.format(body=body, early=textwrap.dedent(early))
    (folder / "program.py").write_text(HELPERS + program)


def agent(folder: Path, *words: object) -> subprocess.Popen[str]:
    """torchrun itself, in `folder`, with its output in the file `said`."""
    (folder / "torchrun.py").write_text(TORCHRUN)
    with (folder / "said").open("a") as said:
        return start(*words, python=["torchrun.py"], cwd=folder, stdout=said, stderr=said)


def lone_rank(folder: Path, rank: int, port: int, **env: str) -> subprocess.Popen[str]:
    """One of two ranks of the planted program, each on a host of its own."""
    where = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, "program.py", *SCORE]
    return popen(template, command, env={**os.environ, **where, **env}, cwd=folder)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def pids() -> Iterator[set[int]]:
    """Processes that a test started and that its failure must not leave."""
    started: set[int] = set()
    yield started
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_rank_ends_with_its_agent(tmp_path: Path, pids: set[int]) -> None:
    """On one host, where nothing else watches it."""
    (tmp_path / "agent.py").write_text(AGENT)
    write_program(tmp_path, "tell('pid', os.getpid()); time.sleep(600)")
    with popen(template, [sys.executable, "agent.py", *SCORE], cwd=tmp_path) as process:
        pids.add(int(told(tmp_path / "pid")))
        process.kill()
    assert all_gone(pids, SECONDS)


def test_a_rank_whose_agent_ended_before_it_began_ends(tmp_path: Path) -> None:
    """The parent is gone between the two questions to the kernel."""
    early = """
    parents = iter([os.getppid(), 1])
    os.getppid = lambda: next(parents)
    """
    write_program(tmp_path, early=early)
    rank = lone_rank(tmp_path, 0, free_port(), TORCHELASTIC_RUN_ID="x")
    assert rank.wait(SECONDS) == -signal.SIGKILL
    rank.communicate()


def test_ranks_that_are_started_again_find_each_other(tmp_path: Path) -> None:
    """Rank 1 comes before rank 0, whose address in the agent's store is an old one."""
    early = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
        time.sleep(0.5)
    """
    body = """
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    """
    write_program(tmp_path, body, early)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for count, code in (("0", -signal.SIGKILL), ("1", 0)):
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": count}
        ranks = [lone_rank(tmp_path, rank, store.port, **env) for rank in range(2)]
        said = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [code, code], said


def test_a_rank_that_loads_ends_soon_after_a_signal(tmp_path: Path) -> None:
    """Its main thread runs no handler: torchrun would wait for it for 30 seconds."""
    body = """
    process.UNWINDING_SECONDS = 3600.0
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    tell("stuck", "")
    ctypes.CDLL(None).sleep(600)
    """
    write_program(tmp_path, body)
    rank = lone_rank(tmp_path, 0, free_port(), WORLD_SIZE="1")
    told(tmp_path / "stuck")
    rank.terminate()
    assert rank.wait(SECONDS) == 143
    rank.communicate()


# A rank's meeting takes too long from when the test says so; it tells the test who is missing.
LATE = """
class Limits(dict):
    def __getitem__(self, phase):
        return 0.0 if Path("late").exists() else 3600.0
supervisor.LIMITS = Limits(supervisor.LIMITS)
def note_missing(me, missing, note=process.RankProcess.note_missing):
    note(me, missing)
    tell("missing", missing)
process.RankProcess.note_missing = note_missing
"""


def ended_late(rank: subprocess.Popen[str], folder: Path) -> str:
    """The message of a rank whose meeting takes too long."""
    (folder / "late").touch()
    _, err = rank.communicate(timeout=SECONDS)
    assert rank.returncode == 1
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("rank", "missing"),
    [
        (0, f"rank 1 did not come (rank 0 came, on {HOST})"),
        (1, "the store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port} did not answer"),
    ],
)
def test_a_host_that_never_comes_is_named(rank: int, missing: str, tmp_path: Path) -> None:
    port = free_port()
    missing = missing.format(port=port)
    write_program(tmp_path, early=LATE)
    process = lone_rank(tmp_path, rank, port)
    assert waited(lambda: told(tmp_path / "missing") == missing)
    err = ended_late(process, tmp_path)
    assert err.startswith(f"dovetail: {missing} within ")
    assert "cut off from the network or slow to start; the limit is trainer.timeouts.meet=0" in err
    assert err.endswith(f"; the job ends (rank {rank} on {HOST} was in phase meet)\n")


def test_a_store_whose_host_falls_silent_ends_the_job(tmp_path: Path) -> None:
    """The rank waits inside torch, which has no limit there."""
    (tmp_path / "store.py").write_text(STORE)
    write_program(tmp_path, early=LATE)
    with popen(template, [sys.executable, "store.py"], cwd=tmp_path) as agent:
        port = int(told(tmp_path / "port"))
        process = lone_rank(tmp_path, 1, port, TORCHELASTIC_USE_AGENT_STORE="True")
        assert waited(lambda: told(tmp_path / "missing") == "rank 0 did not come")
        agent.send_signal(signal.SIGSTOP)
        err = ended_late(process, tmp_path)
        agent.kill()
    assert err.startswith("dovetail: rank 0 did not come within ")


@pytest.mark.soak
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 12])
def test_a_run_comes_back_after_a_kill(
    hosts: int,
    rank: int,
    rows: int,
    model: Path,
    tmp_path: Path,
) -> None:
    """The real command is killed after so many rows of metrics; no rows: while it starts."""
    agents = run_of_agents(hosts, model, tmp_path, steps=15)
    assert waited(lambda: rank in pids_of(agents) and rows_of(tmp_path) >= rows)
    os.kill(pids_of(agents)[rank], signal.SIGKILL)
    codes = [process.wait(SECONDS) for process in agents]
    assert codes == [0] * hosts, (tmp_path / "said").read_text()
    steps = [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")]
    assert steps == list(range(1, 16))


@pytest.mark.soak
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_ranks_end_when_an_agent_is_killed(
    hosts: int,
    rows: int,
    model: Path,
    tmp_path: Path,
    pids: set[int],
) -> None:
    """The real command, after so many rows of metrics; no rows: while it starts."""
    agents = run_of_agents(hosts, model, tmp_path, steps=100000)
    assert waited(lambda: len(pids_of(agents)) == 2)
    assert waited(lambda: rows_of(tmp_path) >= rows)
    pids |= children_of([agents[-1].pid])
    agents[-1].kill()
    agents[-1].wait()
    assert all_gone(pids, SECONDS)
    for process in agents[:-1]:
        process.terminate()
        process.wait(SECONDS)


def run_of_agents(hosts: int, model: Path, folder: Path, steps: int) -> list[subprocess.Popen[str]]:
    """A run of two ranks by one agent, or by two that meet at a port of this machine."""
    (folder / "grader.py").write_text(GRADER)
    rows = write_rows(folder / "rows.jsonl", [{"prompt": "ab", "answer": "c"}] * 2)
    recipe = write_recipe(
        folder / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "grader:slow", "timeout_seconds": 600},
        trainer={"steps": steps, "save_every": 1},
        layout={"dp": 2},
    )
    flags = ["--nnodes", hosts, "--nproc-per-node", 2 // hosts, "--max-restarts", 3]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = ["-m", "dovetail", "train", recipe, "--device", "cpu"]
    return [agent(folder, *flags, *command) for _ in range(hosts)]


def pids_of(agents: list[subprocess.Popen[str]]) -> dict[int, int]:
    """The processes of the ranks that have started, by rank."""
    return {rank: pid for process in agents for rank, pid in ranks_of(process).items()}


def rows_of(folder: Path) -> int:
    metrics = folder / "run/metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0
