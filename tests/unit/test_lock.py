"""A run directory has one owner at a time: others are refused by name, a dead one is followed at once."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail.run.lock import RunLock
from dovetail.run.paths import LOCK
from tests.helpers.forked import popen
from tests.helpers.harness import template
from tests.helpers.program import here, make_model, refusal, write_recipe, write_rows

SECONDS = 2.0  # from the claim to the refusal
HOLD = """
import sys, time
from pathlib import Path
from dovetail.run.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("taken", flush=True)
time.sleep(600)
"""
RACE = """
import os, sys, time
from pathlib import Path
from dovetail.errors import ConfigError
from dovetail.run.lock import RunLock
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
won = 0
while won < rounds:
    lock = RunLock(folder)
    try:
        lock.acquire()
    except ConfigError:
        continue
    os.close(os.open(folder / "owner", os.O_CREAT | os.O_EXCL))  # fails where there are two owners
    won += 1
    os.unlink(folder / "owner")
    lock.release()
"""


def forked(program: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs it, with the folder as its first argument."""
    path = folder.parent / f"{folder.name}.py"
    path.write_text(program)
    return popen(template, [sys.executable, str(path), str(folder), *map(str, arguments)])


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = forked(HOLD, tmp_path)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


def test_the_second_one_is_refused_and_told_who_is_there(
    owner: subprocess.Popen[str], tmp_path: Path
) -> None:
    took = []
    for _ in range(5):  # on a busy machine any one may wait for its turn
        begun = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            RunLock(tmp_path).acquire()
        took.append(time.monotonic() - begun)
    assert min(took) < SECONDS
    told = re.search(
        r"is in use by process (\d+) on (\S+), since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)",
        str(caught.value),
    )
    assert told is not None, caught.value
    assert (int(told[1]), told[2]) == (owner.pid, socket.gethostname())


def test_a_dead_owner_is_followed(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == owner.pid, "it left its lock behind"
    lock = RunLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_what_stands_in_the_file_decides_nothing(tmp_path: Path) -> None:
    """A process id that lives again, a clock that was wrong, garbage: only the system's lock counts."""
    for text in (
        json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "started": "2099"}),
        "garbage",
        "",
    ):
        (tmp_path / LOCK).write_text(text)
        lock = RunLock(tmp_path)
        lock.acquire()
        lock.release()


def test_a_lock_that_is_no_file_of_its_own_is_refused(tmp_path: Path) -> None:
    """Through a link the file of somebody else would be emptied."""
    (tmp_path / "precious").write_text("data")
    for make in (lambda path: path.symlink_to("precious"), Path.mkdir, os.mkfifo):
        make(tmp_path / LOCK)
        with pytest.raises(OSError):
            RunLock(tmp_path).acquire()
        (tmp_path / LOCK).rmdir() if make is Path.mkdir else (tmp_path / LOCK).unlink()
    assert (tmp_path / "precious").read_text() == "data"
    RunLock(tmp_path).acquire()


@pytest.mark.parametrize("rounds", [150, pytest.param(1000, marks=pytest.mark.soak)])
def test_no_race_has_two_winners(rounds: int, tmp_path: Path) -> None:
    """Nor one with a loser for good: each of four processes comes to own the directory so often."""
    racers = [forked(RACE, tmp_path, rounds) for _ in range(4)]
    told = [racer.communicate(timeout=300)[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4, told


def test_a_run_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    """By command: before anything is read, written or moved."""
    model, rows = (
        make_model(tmp_path / "model"),
        write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}]),
    )
    recipe = write_recipe(
        tmp_path / "r.yaml", model, rows, trainer={"prompts_per_step": 1, "save_every": 1}
    )
    assert here("train", recipe).code == 0
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    told = refusal(here("train", recipe, "trainer.steps=9"))
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in told
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    lock.release()
    assert here("train", recipe, "trainer.steps=3").code == 0
