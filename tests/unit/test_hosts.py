"""Jobs on several hosts: one that falls silent ends the job, and what the hosts were given is the same, or refused."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public

from dovetail.cli.arguments import parse
from dovetail.cli.consistency import KEY, job_inputs, refuse_differences
from dovetail.errors import ConfigError
from dovetail.launch import hosts
from dovetail.launch.hosts import Heartbeats, _Monitor
from dovetail.launch.process import start_worker
from dovetail.parallel.consensus import refuse_different
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.run import lock
from tests.helpers.harness import run
from tests.helpers.processes import SECONDS, all_gone, waited
from tests.helpers.program import (
    Ended,
    _as_rank,
    here,
    make_model,
    refusal,
    write_recipe,
    write_rows,
)

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")


def test_the_silent_host_is_named_with_its_ranks() -> None:
    heartbeats = Heartbeats(limit=35.0, gone=20.0)
    for rank, (host, seen) in enumerate([("a", 100.0), ("b", 61.0), ("b", 64.9), ("c", 100.0)]):
        heartbeats.note(rank, host, seen)
    assert heartbeats.verdict(96.0) == ""
    told = "host b (rank 1, 2) gave no sign for 36 s: the host is down, stopped or cut off from the network"
    assert heartbeats.verdict(97.0) == told
    heartbeats.last.pop(1)
    heartbeats.last.pop(2)
    assert heartbeats.verdict(134.0) == ""
    heartbeats.note(0, "a", 128.0)
    heartbeats.end(3, 110.0)
    assert heartbeats.verdict(129.0) == ""
    assert heartbeats.verdict(131.0) == "host c (rank 3) gave no sign for 31 s: the process ended"


def test_a_monitor_that_ends_while_a_host_connects_is_silent() -> None:
    reported: list[Any] = []

    async def connect(turns: int) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        listener = socket.create_server(("127.0.0.1", 0))
        await asyncio.start_server(
            _Monitor({"limit": 9.0, "gone": 9.0, "token": "t"})._welcome, sock=listener
        )
        with socket.create_connection(listener.getsockname()):
            for _ in range(turns):
                await asyncio.sleep(0)

    for turns in range(8):  # of the event loop
        asyncio.run(connect(turns))
    assert reported == []


def test_a_monitor_ends_with_a_rank_that_ends_at_once() -> None:
    """Before it has reached the first rank's monitor, which is gone as well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = {"address": "127.0.0.1", "port": listener.getsockname()[1], "token": "t", "host": "h"}
    setup = {
        "rank": 1,
        "host": "h",
        "parent": os.getpid(),
        "beat": 9.0,
        "limit": 3600.0,
        "gone": 9.0,
        "hub": hub,
    }
    with start_worker("dovetail.launch.hosts") as monitor:
        said, _ = monitor.communicate(f"{json.dumps(setup)}\n".encode(), timeout=SECONDS)
    assert said == b""


RANK = """
import ctypes, os, sys, time
from pathlib import Path
from dovetail.launch import hosts
hosts.BEAT_SECONDS, hosts.SILENT_SECONDS, hosts.GONE_SECONDS = 0.1, 2.0, 1.0
class Files:
    def set(self, key, value):
        Path("part").write_text(value)
        os.rename("part", key.replace("/", "_"))
    def get(self, key):
        while not Path(key.replace("/", "_")).exists():
            time.sleep(0.01)
        return Path(key.replace("/", "_")).read_bytes()
rank = int(sys.argv[1])
watch = hosts.HostWatch(Files(), rank, "127.0.0.1")
Path(f"begun{rank}").write_text("")
exec(sys.argv[2])
print(watch.wait(print))
"""
Begin = Callable[[int, str], subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a rank that is a few lines of Python, and ends when it has to."""
    started: list[subprocess.Popen[str]] = []

    def begin(rank: int, body: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(hosts.__file__).parents[2])}
        argv = [sys.executable, "-c", RANK, str(rank), body]
        started.append(
            subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="a stopped process is found by /proc"
)
def test_all_ranks_end_when_one_is_stopped_and_none_for_being_busy(
    begin: Begin, tmp_path: Path
) -> None:
    """Rank 2 holds Python's lock for longer than a rank may be silent; rank 1 does not end by itself."""
    ranks = [begin(0, ""), begin(1, ""), begin(2, "ctypes.PyDLL(None).sleep(3)")]
    assert waited(lambda: all((tmp_path / f"begun{rank}").exists() for rank in range(3)))
    where = json.loads((tmp_path / hosts.KEY.replace("/", "_")).read_text())
    with socket.create_connection(("127.0.0.1", where["port"])) as stranger:
        stranger.sendall(b"hello you 1 me\n")
        time.sleep(0.5)  # for all to have met
        os.kill(ranks[1].pid, signal.SIGSTOP)
        told = f"host {HOST} (rank 1) gave no sign for 2 s: the host is down, stopped or cut off from the network\n"
        assert [rank.communicate(timeout=30)[0] for rank in (ranks[0], ranks[2])] == [told, told]
        assert ranks[1].wait(30) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("ends", "told"),
    [("watch.leave()", ""), ("os._exit(1)", "gave no sign for 1 s: the process ended")],
)
def test_a_rank_may_leave_and_must_not_vanish(ends: str, told: str, begin: Begin) -> None:
    waits = "time.sleep(2.5) or watch.leave()" if not told else ""
    ranks = [begin(0, waits), begin(1, ends)]
    assert told in ranks[0].communicate(timeout=30)[0]
    assert ranks[0].returncode == 0
    assert ranks[1].wait(30) == bool(told)
    assert all_gone({rank.pid for rank in ranks}, 1.0)


def test_differences_of_what_ranks_were_given_are_told_by_key_host_and_value(
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "m", tmp_path / "d")
    other = ["optim.lr=0.5", "optim.clip_norm=null", f"reward.options.text={'x' * 999}"]
    command = ["train", str(recipe), "run_dir=elsewhere"]
    assert _told(command, [*command, "run_dir=here"]) == []
    told = _told(command, command, [*command, *other])
    assert told == [
        f"reward.options: {{}} on {HOST} (rank 0, 1); not given on {HOST} (rank 2)",
        f"optim.lr: 0.001 on {HOST} (rank 0, 1); 0.5 on {HOST} (rank 2)",
        f"optim.clip_norm: 1.0 on {HOST} (rank 0, 1); null on {HOST} (rank 2)",
        f'reward.options.text: not given on {HOST} (rank 0, 1); "{"x" * 199}... (1001 characters) on {HOST} (rank 2)',
    ]
    score = ["score", "--model", "m", "--data", "d", "--out", "o"]
    assert _told(score, [*score[:-1], "p"]) == []
    assert _told(score, [*score, "--temperature", "2"]) == [
        f"temperature: 1.0 on {HOST} (rank 0); 2.0 on {HOST} (rank 1)"
    ]
    with mock.patch("dovetail.__version__", "9"):
        newer = job_inputs(parse(score))
    assert _compared([job_inputs(parse(score)), newer])[0].startswith(
        "version of dovetail: 0.1.0 (source "
    )


def _told(*commands: list[str]) -> list[str]:
    return _compared([job_inputs(parse(argv)) for argv in commands])


def _compared(everyone: list[dict[str, str]]) -> list[str]:
    """What every rank says that was given one of these."""
    store, said = HashStore(), dict[int, str]()

    def compare(rank: int) -> None:
        said[rank] = ""
        try:
            refuse_differences(store, rank, len(everyone), everyone[rank])
        except ConfigError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(everyone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(said.values())) == 1
    return [line.removeprefix("  - ") for line in said[0].splitlines()[1:]]


def test_a_command_compares_what_it_was_given_before_ranks_do_anything_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score = ["score", "--model", "m", "--data", "d", "--out", "o", "--device", "cpu"]
    store, theirs = HashStore(), job_inputs(parse([*score, "--temperature", "2"]))
    store.set(f"{KEY}/1", json.dumps(["other", theirs]))
    monkeypatch.setattr("dovetail.parallel.process_group._meet", lambda *_: (store, 0, 2))
    monkeypatch.setattr(
        "dovetail.parallel.process_group._initialize", lambda *_: pytest.fail("it began")
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert refusal(here(*score)).endswith(
        f"temperature: 1.0 on {HOST} (rank 0); 2.0 on other (rank 1)\n"
    )


def test_the_code_of_the_package_is_part_of_what_is_given(tmp_path: Path) -> None:
    score = parse(["score", "--model", "m", "--data", "d", "--out", "o"])
    (tmp_path / "a.py").write_text("x = 1\n")
    found = []
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "a.py").write_text(text)
        with mock.patch("dovetail.__file__", str(tmp_path / "__init__.py")):
            found.append(job_inputs(score)["version of dovetail"])
    assert found[0] != found[1]


def contents(values: list[str]) -> str:
    mesh = Mesh.build(Layout(dp=2))
    try:
        refuse_different({"--model": "same", "data.train": values[mesh["world"].rank]}, mesh)
    except ConfigError as error:
        return str(error)
    return ""


def directories(paths: list[Path]) -> str:
    mesh = Mesh.build(Layout(dp=2))
    with mock.patch.object(lock, "VISIBLE_SECONDS", 0.5):
        try:
            lock.refuse_unshared(paths[mesh["world"].rank], mesh)
        except ConfigError as error:
            return str(error)
    return ""


def test_other_files_behind_one_name_are_told() -> None:
    assert run(2, contents, ["a" * 64, "a" * 64]) == ["", ""]
    told = run(2, contents, ["a" * 64, "b" * 64])
    assert told[0] == told[1]
    assert told[0].endswith(
        f"\n  - data.train: {'a' * 12} on {HOST} (rank 0); {'b' * 12} on {HOST} (rank 1)"
    )


def test_a_run_directory_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for mine, other, same in [
        ("a/run", "a/run", True),
        ("a/run", "link/run", True),
        ("a/run", "b/run", False),
        ("a", "b", False),
        ("a/x/run", "a/x/other", False),
    ]:
        told = run(2, directories, [tmp_path / mine, tmp_path / other])
        words = f"is not the same directory on all hosts: {HOST} (rank 1) cannot see what {HOST} (rank 0) writes there"
        assert all((words in each) != same for each in told), (mine, other, told)
        assert all(each == "" for each in told) == same
    assert [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()] == [], "nothing stays"


def one_of(commands: list[list[str]]) -> Ended:
    return _as_rank(commands[dist.get_rank()])


@pytest.mark.parametrize(
    "differs", ["run_dir", "data.train", "data.eval", "model.path", "reference.path", "--model"]
)
def test_ranks_with_other_files_are_refused(differs: str, model: Path, tmp_path: Path) -> None:
    """By the command itself: what stands behind a path may differ where the paths do not."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek((other / "model.safetensors").stat().st_size // 2)
        file.write(b"\0" * 64)
    rows = [
        write_rows(tmp_path / f"{word}.jsonl", [{"prompt": "ab", "answer": word}])
        for word in ("one", "two")
    ]
    paths = {"run_dir": (tmp_path / "a", tmp_path / "b"), "data.train": rows, "data.eval": rows}
    this, that = paths.get(differs, (model, other))
    if differs == "--model":
        ids, out = (
            write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6]}]),
            str(tmp_path / "out"),
        )
        told = run(
            2,
            one_of,
            [["score", "--data", str(ids), "--out", out, "--model", str(m)] for m in (this, that)],
        )
    else:
        recipe = write_recipe(tmp_path / "r.yaml", model, rows[0], algorithm={"name": "grpo"})
        told = run(
            2,
            one_of,
            [["train", str(recipe), "--dry-run", f"{differs}={path}"] for path in (this, that)],
        )
    words = "is not the same directory on all hosts" if differs == "run_dir" else f"\n  - {differs}"
    assert all(each.code == 2 and words in each.err for each in told), told
