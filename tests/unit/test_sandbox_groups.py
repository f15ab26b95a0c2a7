"""The control group of a program."""

import sys
from pathlib import Path

import pytest

from dovetail.rewards.sandbox.client import Sandbox
from dovetail.rewards.sandbox.groups import TOP, make_group, remove_group
from dovetail.rewards.sandbox.isolation import Isolation
from dovetail.rewards.sandbox.limits import ProgramLimits

LIMITS = ProgramLimits(seconds=5.0, memory_mib=256)
MEMORY_OF_CHILDREN = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        data = b"x" * (100 << 20)
        time.sleep(5)
        os._exit(0)
time.sleep(2)
print("all alive")
"""


def machine(folder: Path, controllers: str) -> Path:
    """Files as the kernel's, for a process in /slice/scope."""
    (folder / "slice/scope").mkdir(parents=True)
    (folder / "slice/cgroup.subtree_control").write_text(controllers)
    (folder / "membership").write_text("4:memory:/old\n0::/slice/scope\n")
    return folder / "membership"


def test_a_group_lies_beside_the_process_s_own(tmp_path: Path) -> None:
    membership = machine(tmp_path, "cpu memory pids\n")
    group = make_group("program", LIMITS, tmp_path, membership)
    assert group == tmp_path / "slice/program"
    values = {path.name: path.read_text() for path in group.iterdir()}
    assert values == {
        "memory.max": str(256 << 20),
        "memory.oom.group": "1",
        "memory.swap.max": "0",
        "pids.max": "65",
    }


@pytest.mark.parametrize("controllers", ["", "cpu", "memory", "pids"])
def test_without_both_controllers_there_is_none(tmp_path: Path, controllers: str) -> None:
    membership = machine(tmp_path, controllers)
    assert make_group("program", LIMITS, tmp_path, membership) is None
    assert not (tmp_path / "slice/program").exists()


def test_without_version_2_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("4:memory:/old\n")
    assert make_group("program", LIMITS, tmp_path, tmp_path / "membership") is None
    assert make_group("program", LIMITS, tmp_path, tmp_path / "nothing") is None


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_kernel_ends_a_program_whose_children_take_too_much() -> None:
    group = make_group("dovetail-test", LIMITS)
    if group is None:
        pytest.skip("this process may make no control group of version 2")
    remove_group(group)
    before = sorted(TOP.rglob("dovetail-*"))
    with Sandbox(Isolation.USER, LIMITS) as sandbox:
        outcome = sandbox.run_with_input(MEMORY_OF_CHILDREN, "")
    assert outcome.status != 0
    assert "all alive" not in outcome.output
    assert sorted(TOP.rglob("dovetail-*")) == before
