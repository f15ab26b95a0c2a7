"""What tests that kill and stop programs need to know of processes, by /proc."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dovetail.launch.progress import Phase, State, read_state
from dovetail.system import children_of, kernel_state
from tests.helpers.program import start, write_recipe, write_rows

SECONDS = 240.0  # for a program to come to some point, on a busy machine
ENDLESS = 100000  # steps: days
AT_REST, AT_WORK = (
    0.05,
    0.001,
)  # seconds between two looks at a rank that imports, and at one that has phases
FORKED = re.compile(r"dovetail$|rank (?P<rank>\d+)$")  # names that tests/helpers/forked.py gives
GRADER = """
import time

def slow(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.02)
    return float(len(solution_str) % 3)
"""


def rl_run(
    model: Path,
    folder: Path,
    *flags: object,
    temporary: str = "tmp",
    grader: str = GRADER,
    answer: str = "c",
    **trainer: object,
) -> subprocess.Popen[str]:
    """A run of the command that goes through every phase of RL; its temporary files lie in a folder of their own."""
    (folder / "grader.py").write_text(grader)
    (folder / temporary).mkdir()
    rows = write_rows(folder / "rows.jsonl", [{"prompt": "ab", "answer": answer}] * 2)
    recipe = write_recipe(
        folder / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo", "num_mini_batches": 2},
        data={"eval": str(rows)},
        reward={"import": "grader:slow", "timeout_seconds": 600},
        trainer={"steps": ENDLESS, **trainer},
    )
    return start("train", recipe, *flags, env={"TMPDIR": str(folder / temporary)})


def is_alive(pid: int) -> bool:
    return kernel_state(pid) not in ("", "Z", "X")


def all_gone(pids: set[int], seconds: float) -> bool:
    """Whether all of them end within that time."""
    return waited(lambda: not any(map(is_alive, pids)), seconds)


def waited(holds: Callable[[], object], seconds: float = SECONDS, every: float = 0.02) -> bool:
    """Whether something comes to hold within that time; it is looked at `every` so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(every)
    return bool(found)


def programs() -> set[int]:
    """The processes below this one that are dovetail commands: those that a failed test left, and their ranks."""
    found = set()
    for pid in children_of([os.getpid()]):
        with contextlib.suppress(OSError):
            if (
                FORKED.match(_name(pid))
                or b"-m\0dovetail\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                found.add(pid)
    return found


def listens(pid: int, number: int) -> bool:
    """Whether a process has a handler for that signal by now."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """The process of each rank that has started, by rank."""
    found = {}
    for pid in children_of([process.pid]):
        with contextlib.suppress(OSError):
            if forked := FORKED.match(_name(pid)):
                if forked["rank"]:
                    found[int(forked["rank"])] = pid
                continue
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            rank = next((int(item[5:]) for item in environment if item.startswith(b"RANK=")), None)
            if rank is not None and b"-c" not in command:  # reward workers inherit the environment
                found[rank] = pid
    return found


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def state_of(rank: int, temporary: Path) -> State | None:
    """What a rank of the program whose TMPDIR is `temporary` last told."""
    for folder in temporary.glob("dovetail-watch-*"):
        return read_state(folder / f"rank_{rank}.state")
    return None


def stopped_in(
    process: subprocess.Popen[str], rank: int, phase: Phase, step: int, temporary: Path
) -> int | None:
    """Stop a rank with SIGSTOP in that phase, not before that step: its pid; None where the program ended before."""
    deadline = time.monotonic() + SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, (
            f"rank {rank} never came to {phase}: {state_of(rank, temporary)}"
        )
        pid = (
            ranks_of(process).get(rank)
            if phase in ("init", "load") or _is_at(rank, phase, step, temporary)
            else None
        )
        if pid is None or not _is_at(rank, phase, step, temporary):
            time.sleep(AT_REST if state_of(rank, temporary) is None else AT_WORK)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            waited(partial(_rests, pid), 5.0)
            if _is_at(rank, phase, step, temporary):
                return pid
            os.kill(pid, signal.SIGCONT)
    return None


def _rests(pid: int) -> bool:
    return kernel_state(pid) != "R"


def _is_at(rank: int, phase: Phase, step: int, temporary: Path) -> bool:
    state = state_of(rank, temporary)
    return state is not None and state.phase == phase and (state.step or 0) >= step
