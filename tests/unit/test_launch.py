"""Local ranks: how they end, what they say and how often, and that nothing stays behind.

Each test runs `python -m dovetail score` with a planted `dovetail.cli.score` that does what the test is about.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public

from dovetail import system
from dovetail.errors import ConfigError, LayoutError, MachineError
from dovetail.parallel import process_group
from tests.helpers.forked import popen
from tests.helpers.harness import template
from tests.helpers.processes import SECONDS, all_gone, waited
from tests.helpers.program import here, refusal

START = """
import os, runpy, sys, time, types
import dovetail.cli
from dovetail.cli import preflight
from dovetail.errors import DataError
preflight.preflight = lambda args, layout: True  # the planted command needs no model
command = types.ModuleType("dovetail.cli.score")
sys.modules["dovetail.cli.score"] = command
def run(args, progress):
    import torch.distributed as dist
    rank = dist.get_rank()
{body}
command.run = run
sys.argv = [__file__, *sys.argv[1:]]
"""
# The ranks must run the planted command too, so the script stands in for `-m dovetail` in the command of the ranks.
RANKS = """
from dovetail.cli import main as program
plain = program.run_ranks
program.run_ranks = lambda command, *options: plain([command[0], __file__, *command[3:]], *options)
program.main()
"""

Start = Callable[..., subprocess.Popen[str]]
TWO = pytest.param(
    "tp=2", marks=pytest.mark.soak
)  # two ranks of real commands do the same in commands/ and fault/


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def begin(body: str, *flags: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        script = tmp_path / "program.py"
        script.write_text(START.format(body=textwrap.indent(textwrap.dedent(body), "    ")) + RANKS)
        given = ["score", "--model", "m", "--data", "d", "--out", "o", "--device", "cpu", *flags]
        clean = {
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
        }
        known = {**clean, "OMP_NUM_THREADS": "1", **(env or {})}
        return popen(template, [sys.executable, str(script), *given], cwd=tmp_path, env=known)

    return begin


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return (
        process.returncode,
        out,
        "\n".join(line for line in err.splitlines() if "Warning" not in line),
    )


def wait_for_file(path: Path) -> str:
    assert waited(lambda: path.exists() and path.read_text()), f"{path} was not written"
    return path.read_text()


@pytest.mark.soak  # test_program.py and test_train_command.py start ranks that do
def test_ranks_meet_and_end_well(start: Start) -> None:
    body = """
    x = __import__("torch").ones(1)
    dist.all_reduce(x)
    open(f"rank{rank}", "w").write(str(x.item()))
    """
    process = start(body, "--layout", "tp=2")
    code, _, err = ended(process)
    assert (code, err) == (0, "")


def test_one_rank_runs_in_this_process_with_a_group(start: Start) -> None:
    assert ended(start("print(dist.get_world_size(), 'RANK' in os.environ)"))[:2] == (
        0,
        "1 False\n",
    )


@pytest.mark.soak  # so do mistakes of real commands in commands/test_program.py
@pytest.mark.parametrize("layout", ["tp=1", "tp=2"])
def test_users_mistake_on_every_rank_is_told_once(start: Start, layout: str) -> None:
    code, out, err = ended(start("raise DataError('row 3 has no tokens')", "--layout", layout))
    assert (code, out, err) == (2, "", "dovetail: row 3 has no tokens")


def test_users_mistake_on_the_last_rank_alone_is_told(start: Start) -> None:
    body = """
    if rank == 1:
        raise DataError('row 4 is too long')
    dist.barrier()
    """
    assert ended(start(body, "--layout", "dp=2"))[::2] == (2, "dovetail: row 4 is too long")


def test_defect_shows_the_first_failing_ranks_traceback_once(start: Start) -> None:
    body = """
    if rank == 1:
        raise KeyError('planted')
    dist.barrier()
    """
    code, _, err = ended(start(body, "--layout", "tp=2"))
    assert code == 1
    assert err.startswith("dovetail: rank 1: this is a defect of ours\nTraceback")
    assert err.count("Traceback") == 1
    assert err.endswith("KeyError: 'planted'")


@pytest.mark.soak  # fault/test_deaths.py kills a rank at work
def test_killed_rank_is_named_and_ends_the_others(start: Start) -> None:
    body = """
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)
    """
    code, _, err = ended(start(body, "--layout", "tp=2"))
    assert code == 1
    assert err.startswith(f"dovetail: rank 1 ({socket.gethostname()}, pid ")
    assert ") ended in phase load: killed by SIGKILL: " in err
    assert len(err.splitlines()) == 1, "the others failed because of it, so they say nothing"


@pytest.mark.parametrize("layout", ["tp=1", TWO])
def test_sigterm_reaches_the_ranks_for_a_clean_stop(
    start: Start, layout: str, tmp_path: Path
) -> None:
    body = """
    from dovetail.parallel.process_group import StopSignal
    with StopSignal() as stop:
        dist.barrier()
        open(f"ready{rank}", "w").write("x")
        while not stop.number:
            time.sleep(0.05)
    open(f"stopped{rank}", "w").write("x")
    return 143
    """
    process = start(body, "--layout", layout)
    wait_for_file(tmp_path / "ready0")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[::2] == (143, "")
    assert (tmp_path / "stopped0").exists()
    assert (tmp_path / "stopped1").exists() == (layout == "tp=2")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT]
)
def test_signal_ends_a_command_without_a_handler(
    start: Start, number: signal.Signals, tmp_path: Path
) -> None:
    process = start("open(f'ready{rank}', 'w').write('x'); time.sleep(600)", "--layout", "tp=2")
    wait_for_file(tmp_path / "ready0")
    wait_for_file(tmp_path / "ready1")
    process.send_signal(number)
    assert ended(process)[::2] == ({signal.SIGTERM: 143, signal.SIGINT: 130}[number], "")


@pytest.mark.parametrize(
    ("layout", "does"), [("tp=1", "time.sleep(600)"), ("tp=2", "raise KeyError('planted')")]
)
def test_a_stop_in_the_middle_of_what_catches_it_is_a_stop(
    start: Start, layout: str, does: str, tmp_path: Path
) -> None:
    """Imports of others do: they fail in another way, or go on."""
    body = f"""
    from dovetail.launch import rank as process
    process.UNWINDING_SECONDS = 0.5
    try:
        open(f"ready{{rank}}", "w").write("x")
        time.sleep(600)
    except SystemExit:
        {does}
    """
    process = start(body, "--layout", layout)
    for rank in range(1 if layout == "tp=1" else 2):
        wait_for_file(tmp_path / f"ready{rank}")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "", "")


def test_no_rank_outlives_a_killed_parent(start: Start, tmp_path: Path) -> None:
    process = start(
        "open(f'pid{rank}', 'w').write(str(os.getpid())); time.sleep(600)", "--layout", "tp=2"
    )
    pids = [int(wait_for_file(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.kill()
    process.communicate(timeout=SECONDS)
    assert all_gone(set(pids), SECONDS), "a rank outlived its parent"


@pytest.mark.soak  # commands/test_program.py gives the real command one
def test_product_other_than_the_launchers_ranks_is_refused_by_rank_0_alone(start: Start) -> None:
    both = {
        rank: start("pass", "--layout", "tp=2,dp=2", env={"RANK": rank, "WORLD_SIZE": "2"})
        for rank in "01"
    }
    told = {rank: ended(process) for rank, process in both.items()}
    message = (
        "dovetail: layout tp=2,dp=2 needs 4 ranks (tp x pp x cp x dp), but the job has 2; "
        "change the degrees or the number of ranks"
    )
    assert told == {"0": (2, "", message), "1": (2, "", "")}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_one_signal_ends_a_rank_that_waits_for_others_to_join(
    number: int, code: int, tmp_path: Path
) -> None:
    """Its main thread is inside torch, where no handler runs, and waited for ten minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "program.py"
    patch = "from dovetail.launch import rank\nrank.UNWINDING_SECONDS = 2.0"
    program.write_text(f"from dovetail.cli import main as program\n{patch}\nprogram.main()\n")
    where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = [
        "score",
        "--model",
        "m",
        "--data",
        "d",
        "--out",
        "o",
        "--device",
        "cpu",
        "--layout",
        "dp=2",
    ]
    process = popen(
        template, [sys.executable, str(program), *flags], env={**os.environ, **where}, cwd=tmp_path
    )
    try:
        assert waited(lambda: process.poll() is not None or _listens(port)), "it never came to wait"
        process.send_signal(number)
        assert process.wait(timeout=30) == code
    finally:
        process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as other:
        return other.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("port", ["abc", "99999", "taken"])
def test_a_port_at_which_nobody_can_meet_is_told(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        given = str(other.getsockname()[1]) if port == "taken" else port
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": given,
        }.items():
            monkeypatch.setenv(name, value)
        kind, words = (
            (MachineError, "already in use")
            if port == "taken"
            else (ConfigError, "a whole number below")
        )
        with pytest.raises(kind, match=f"MASTER_PORT={given}.*{words}"):
            process_group._meet()


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="a CUDA device is here")
def test_missing_device_is_refused() -> None:
    told = refusal(here("score", "--model", "m", "--data", "d", "--out", "o", "--device", "cuda"))
    assert "sees none here; use --device cpu or auto" in told


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a second rank of a machine sees whose launcher shows each rank one GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="a-gpu"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    given = {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "1",
        "XDG_CACHE_HOME": "/proc",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("one_gpu")
def test_a_launcher_may_show_each_rank_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = process_group.pick_device("cuda")
    assert device == torch.device("cuda", 0)
    assert process_group.num_ranks_here(device) == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert process_group.num_ranks_here(device) == 4  # as far as it can know
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(
        LayoutError, match="2 ranks on this machine need a cuda device each, there are 1"
    ):
        process_group.pick_device("cuda")


@pytest.mark.usefixtures("one_gpu")
def test_what_packages_compile_lies_in_the_users_cache_by_architecture(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path), "QUACK_CACHE_DIR": "mine"}):
        process_group.pick_device("cuda")
        folder = tmp_path / "dovetail/kernels/sm90"
        assert folder.is_dir() and os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
        assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder)
        assert os.environ["QUACK_CACHE_DIR"] == "mine", "a place of the user's own stays"
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "/proc"}):
        process_group.pick_device("cuda")
        assert "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ


@pytest.mark.usefixtures("one_gpu")
def test_a_device_is_one_ranks_alone() -> None:
    store, device = HashStore(), torch.device("cuda", 0)
    process_group._claim_device(device, store, 0)
    process_group._claim_device(device, store, 0)  # in a second group
    with pytest.raises(
        LayoutError,
        match="ranks 0 and 1 have the same cuda device, a-gpu; use fewer ranks a machine",
    ):
        process_group._claim_device(device, store, 1)
    process_group._claim_device(torch.device("cpu"), store, 1)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_may_have_the_open_files_of_many_groups(world: int) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few, most = (
        512,
        system.OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, system.OPEN_FILES),
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with mock.patch("torch.distributed.init_process_group"):
            process_group._initialize(torch.device("cpu"), HashStore(), 0, world)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most if world > 1 else few, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_deterministic_sets_torch_for_its_block_alone() -> None:
    """An operation without such a form is a user's mistake that says what to set."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a documented setting
    with process_group.deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a documented setting
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before  # type: ignore[attr-defined]  # a documented setting
    with pytest.raises(
        ConfigError,
        match=r"no deterministic form of cumsum_cuda_kernel.*set trainer.deterministic=false",
    ):
        with process_group.deterministic(True):
            raise RuntimeError(
                "cumsum_cuda_kernel does not have a deterministic implementation, but you set ..."
            )
    with pytest.raises(RuntimeError, match="another"), process_group.deterministic(True):
        raise RuntimeError("another")
