"""Hostile programs against the sandbox of code rewards, as root and as an ordinary user."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import dovetail
from dovetail.rewards.code import code
from tests.helpers.hostile import TESTS, VERDICT, hostile_programs
from tests.helpers.sandbox_roles import ROLES
from tests.helpers.sandbox_trainer import KEY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation is Linux's")
PROGRAMS = hostile_programs()
KINDS = {
    "root": "namespaces",
    "root without sys_admin": "user",
    "root in Docker": "user",
    "user": "namespaces",
}
ONE_OF_EACH = {
    "network": "tcp",
    "unix sockets": "path socket",
    "environment": "trainer's /proc",
    "files": "overwrites",
    "privileges": "capabilities",
    "system": "host name",
    "processes": "kills the trainer",
    "resources": "memory map",
}
VERDICTS = ("frames when called", "always equal", "exits when called")
SHARED_PYTHON = "/usr/bin/python3"  # for a user who cannot enter the home of this one
SOURCES = (Path(dovetail.__file__).parents[1], Path(__file__).parents[2])
ENVIRONMENT = {**os.environ, "TRAINER_KEY": KEY, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
STARTS = """
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "import tests.helpers.sandbox_trainer"])
"""


def python_of(role: str) -> str:
    """A Python that the role can start, that can start itself, and that can read the sources."""
    if not role.startswith("user") or os.geteuid() != 0:
        return sys.executable
    for python in (sys.executable, SHARED_PYTHON):
        command = as_role("user", python, "-c", STARTS)
        tried = subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True)
        if tried.returncode == 0:
            return python
    pytest.skip("no Python 3.11 or newer that an ordinary user could start with these sources")


def as_role(role: str, *command: str) -> list[str]:
    if os.geteuid() == 0:
        return [sys.executable, "-m", "tests.helpers.sandbox_roles", role, *command]
    if role == "user":
        return list(command)
    pytest.skip(f"only root can be {role}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users can enter."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        path.chmod(0o777)
        yield path


def run_as(role: str, isolation: str, folder: Path, programs: Mapping[str, str]) -> dict[str, str]:
    """What each program achieved."""
    request = {"isolation": isolation, "folder": str(folder), "programs": programs}
    command = as_role(role, python_of(role), "-m", "tests.helpers.sandbox_trainer")
    ended = subprocess.run(
        command,
        input=json.dumps(request),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(ended.stdout)
    if "namespaces: " in found.get("refused", "") and KINDS.get(role) == "namespaces":
        pytest.skip(f"this kernel gives no namespaces to {role}")
    return found


@pytest.mark.parametrize("role", KINDS)
def test_a_program_of_each_kind_gets_nothing(role: str, folder: Path) -> None:
    programs = {f"{kind}: {name}": PROGRAMS[kind][name] for kind, name in ONE_OF_EACH.items()}
    if KINDS[role] == "namespaces" and Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("programs have a /tmp of their own, which hides a Python in /tmp")
    found = run_as(role, "required", folder, programs)
    assert found.pop("isolation") == KINDS[role]
    assert {name: gained for name, gained in found.items() if gained} == {}


@pytest.mark.soak
@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("role", KINDS)
def test_no_program_gets_what_it_is_after(role: str, kind: str, folder: Path) -> None:
    found = run_as(role, "required", folder, PROGRAMS[kind])
    found.pop("isolation")
    assert found.keys() >= PROGRAMS[kind].keys()
    assert {name: gained for name, gained in found.items() if gained} == {}


def test_the_same_programs_get_it_without_isolation(folder: Path) -> None:
    programs = {f"{kind}: {name}": PROGRAMS[kind][name] for kind, name in ONE_OF_EACH.items()}
    kinds = ("network", "unix sockets", "environment", "files")
    harmless = {name: programs[name] for name in programs if name.startswith(kinds)}
    found = run_as("user", "none", folder, harmless)
    assert [name for name in harmless if not found[name]] == []


def test_without_any_isolation_nothing_runs(folder: Path) -> None:
    refused = run_as("user in Docker", "required", folder, {})["refused"]
    for word in ("namespaces: ", "user: ", "unshare", "reward.options.isolation: none"):
        assert word in refused


def verdict_cases() -> list[object]:
    slow = pytest.mark.soak
    names = PROGRAMS[VERDICT]
    return [pytest.param(name, marks=() if name in VERDICTS else slow) for name in names]


@pytest.mark.parametrize("name", verdict_cases())
def test_a_program_cannot_say_that_it_has_passed(name: str) -> None:
    program = f"```python\n{PROGRAMS[VERDICT][name]}\n```"
    assert code(program, TESTS, "stop", seconds=0.5) == 0.0


def test_the_table_is_large() -> None:
    assert set(PROGRAMS) == {*ONE_OF_EACH, VERDICT}
    assert set(ROLES) == {*KINDS, "user in Docker"}
    assert sum(map(len, PROGRAMS.values())) >= 80
