"""What a supervisor concludes from what it sees, without any rank; and what it does with ranks that are small scripts."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.launch.hang import Frame, RankStatus, Stack, main_stack, suspects
from dovetail.launch.progress import (
    LIMITS,
    PHASES,
    Phase,
    Progress,
    State,
    calling_every,
    read_state,
)
from dovetail.launch.supervisor import PORTS
from dovetail.parallel.collectives import Handle
from tests.helpers.processes import SECONDS, is_alive, waited

WAITS = Stack(
    (
        Frame("x/torch/distributed/distributed_c10d.py", "9", "all_reduce"),
        Frame("a.py", "1", "step"),
    )
)
WAITS_ELSEWHERE = Stack(
    (Frame("x/torch/distributed/distributed_c10d.py", "7", "barrier"), Frame("a.py", "2", "save"))
)
WORKS = Stack((Frame("user/reward.py", "3", "loop"), Frame("a.py", "1", "step")))
DUMP = """Thread 0x00007f1 (most recent call first):
  File "lib/threading.py", line 331 in wait
  File "lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 (most recent call first):
  File "x/torch/distributed/distributed_c10d.py", line 83 in wrapper
  File "app.py", line 12 in step
  File "app.py", line 40 in <module>

Extension modules: numpy (total: 1)
"""


def seen(
    rank: int, stack: Stack, *, kernel: str = "S", entries: int = 5, phase: Phase = "update"
) -> RankStatus:
    return RankStatus(rank, 100 + rank, State(entries, phase, 3, 0.0, 0.0), kernel, stack)


@pytest.mark.parametrize(
    ("ranks", "odd"),
    [
        ([seen(0, WAITS), seen(1, Stack(), kernel="T"), seen(2, WAITS)], [1]),
        ([seen(0, WAITS), seen(1, Stack(), kernel="D"), seen(2, WAITS)], [1]),
        ([seen(0, WORKS), seen(1, WAITS)], [0]),
        ([seen(0, WAITS), seen(1, WAITS), seen(2, WAITS_ELSEWHERE)], [2]),
        ([seen(0, WAITS), seen(1, WAITS, entries=6)], [1]),
        ([seen(0, WORKS), seen(1, WORKS), seen(2, WORKS, entries=4)], [2]),
        ([seen(0, WORKS)], [0]),
        ([seen(0, WAITS), seen(1, WAITS)], []),
        ([seen(0, WAITS), seen(1, WAITS_ELSEWHERE)], []),
    ],
    ids=[
        "stopped",
        "silent",
        "at work",
        "elsewhere",
        "left early",
        "behind",
        "alone",
        "together",
        "no majority",
    ],
)
def test_the_rank_that_the_others_wait_for_is_told(ranks: list[RankStatus], odd: list[int]) -> None:
    assert suspects(ranks)[0] == odd


def test_the_main_threads_stack_is_read_from_what_faulthandler_writes() -> None:
    stack = main_stack(DUMP)
    assert stack.waits
    assert [frame.line for frame in stack.frames] == ["83", "12", "40"]
    assert (
        str(stack)
        == "distributed/distributed_c10d.py:83 wrapper < app.py:12 step < app.py:40 <module>"
    )
    assert not main_stack("").frames


def test_who_takes_the_result_of_a_collective_waits(tmp_path: Path) -> None:
    """torch's `wait` has no frame of its own."""
    with (tmp_path / "stacks").open("w") as file:
        work = SimpleNamespace(wait=partial(faulthandler.dump_traceback, file, all_threads=True))
        Handle(torch.zeros(1), work.wait).wait()
    stack = main_stack((tmp_path / "stacks").read_text())
    assert stack.waits, str(stack)


def test_progress_is_what_the_main_thread_told_last(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert read_state(path) is None
    progress = Progress(path)
    for step in range(1, 200):
        progress.phase("rollout", step)
        progress.phase("update")
    state = read_state(path)
    assert state is not None
    assert state == progress.state
    assert (state.entries, state.phase, state.step) == (399, "update", 199)
    assert state.where() == "phase update, step 199"
    before = state.beat

    def has_beaten() -> bool:
        state = read_state(path)
        return state is not None and state.beat > before

    with calling_every(0.5, progress.beat):
        assert waited(has_beaten)
    after = read_state(path)
    assert after is not None
    assert after.since == state.since, "a beat is no progress"


def test_every_phase_has_a_limit() -> None:
    assert set(LIMITS) == set(PHASES)


RANK = """
import os, signal, sys, time
from pathlib import Path
from dovetail.launch.rank import RankProcess
me = RankProcess.from_environment()
rank, tell = int(os.environ["RANK"]), me.progress.phase
starts = Path("starts")
with me.watched({{}}):
{body}
"""
SUPERVISOR = """
import sys
from pathlib import Path
from dovetail.launch import supervisor
from dovetail.launch.progress import LIMITS
supervisor.PAUSE_SECONDS = 0.05
supervisor.GRACE_SECONDS = 0.5
limits = {{**LIMITS, "update": {limit}}}
options = supervisor.Supervision(limits=limits, run_dir=Path("run"), restarts={restarts}, resume=("--go", "on"))
sys.exit(supervisor.run_ranks([sys.executable, "rank.py"], {ranks}, options))
"""
Supervise = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def supervise(tmp_path: Path) -> Supervise:
    """Ranks that run a few lines of Python without torch, under a supervisor that is in less of a hurry to wait."""

    def begin(
        body: str, *, ranks: int = 2, restarts: int = 0, limit: float = SECONDS
    ) -> subprocess.Popen[str]:
        (tmp_path / "rank.py").write_text(
            RANK.format(body=textwrap.indent(textwrap.dedent(body), "    "))
        )
        (tmp_path / "job.py").write_text(
            SUPERVISOR.format(ranks=ranks, restarts=restarts, limit=limit)
        )
        (tmp_path / "run").mkdir()
        (tmp_path / "run/config.yaml").write_text("")
        (tmp_path / "tmp").mkdir()
        source = str(Path(__file__).parents[2] / "src")
        env = {**os.environ, "PYTHONPATH": source, "TMPDIR": str(tmp_path / "tmp")}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "job.py"], stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=env
        )

    return begin


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=SECONDS)
    return process.returncode, err


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run/events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_dead_rank_is_written_down_and_leaves_nothing(
    supervise: Supervise, tmp_path: Path
) -> None:
    """Not even what it has started in a session of its own."""
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(f"child{rank}").write_text(str(child.pid))
    tell("save", 7)
    while rank == 1 and not (Path("child0").exists() and Path("child0").read_text()):
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    code, err = ended(supervise(body))
    assert code == 1
    assert ") ended in phase save, step 7: killed by SIGKILL: " in err
    (event,) = events(tmp_path)
    assert event.keys() == {"time", "kind", "rank", "host", "phase", "step", "cause"}
    assert (event["kind"], event["rank"], event["phase"], event["step"]) == ("death", 1, "save", 7)
    for rank in range(2):
        assert not is_alive(int((tmp_path / f"child{rank}").read_text()))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_a_rank_says_reaches_the_user_whatever_letters_it_has(supervise: Supervise) -> None:
    """Such as half of a surrogate pair in what a reward raised: UTF-8 has none."""
    code, err = ended(supervise("me.report('dovetail: \\ud800 is odd'); sys.exit(2)"))
    assert (code, err) == (2, r"dovetail: \ud800 is odd")


def test_a_signal_to_the_command_asks_the_first_rank_for_a_profile(
    supervise: Supervise, tmp_path: Path
) -> None:
    body = """
    from dovetail.launch.rank import StopHandler
    StopHandler(me)
    tell("update", 3)
    Path(f"ready{rank}").write_text("")
    while not me.progress.profile_wanted and not Path("asked0").exists():
        time.sleep(0.01)
    Path(f"asked{rank}").write_text(str(me.progress.profile_wanted))
    """
    process = supervise(body)
    assert waited(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGUSR2)
    assert ended(process) == (0, "")
    assert [(tmp_path / f"asked{rank}").read_text() for rank in range(2)] == ["True", "False"]


def test_a_stopped_rank_is_found_by_its_limit_and_named(
    supervise: Supervise, tmp_path: Path
) -> None:
    """And the other one's stack is waited for, as long as it takes on a busy machine."""
    body = """
    if rank == 1:
        import faulthandler
        faulthandler.unregister(signal.SIGURG)
        late = lambda *_: (time.sleep(2), faulthandler.dump_traceback(me._stacks))
        signal.signal(signal.SIGURG, late)
        tell("rollout", 3)
        Path("ready").write_text("")
        time.sleep(600)
    while not Path("ready").exists():
        time.sleep(0.01)
    tell("update", 3)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    code, err = ended(supervise(body, limit=1.5))
    assert code == 1
    assert "hang: no progress for " in err
    assert "rank 0" in err.splitlines()[-1]
    assert "in phase update, step 3: stopped (SIGSTOP or a debugger)" in err.splitlines()[-1]
    assert "stack of rank 1" in err
    assert "rank.py" in err
    (event,) = events(tmp_path)
    assert (event["kind"], event["rank"]) == ("hang", 0)


def test_ranks_are_started_again_as_often_as_asked(supervise: Supervise, tmp_path: Path) -> None:
    body = """
    if rank == 1:
        count = len(starts.read_text()) if starts.exists() else 0
        starts.write_text("x" * (count + 1))
        tell("update", count + 1)
        if count < 2:
            os._exit(1)
    """
    code, err = ended(supervise(body, restarts=3))
    assert code == 0
    assert err.count("starting all ranks again") == 2
    assert [event["kind"] for event in events(tmp_path)] == ["death", "restart"] * 2


def test_what_had_begun_is_not_begun_again(supervise: Supervise, tmp_path: Path) -> None:
    """Else a run that was told to go back to a step would do so at every start."""
    body = """
    count = len(starts.read_text().splitlines()) if starts.exists() else 0
    with starts.open("a") as file:
        print(*sys.argv[1:], file=file)
    tell(("load", "update", "exit")[count])
    os._exit(count < 2)
    """
    assert ended(supervise(body, ranks=1, restarts=3))[0] == 0
    assert (tmp_path / "starts").read_text().splitlines() == ["", "", "--go on"]


def test_the_same_death_three_times_is_a_crash_loop(supervise: Supervise, tmp_path: Path) -> None:
    code, err = ended(supervise("tell('update', 4)\nos._exit(1)", ranks=1, restarts=9))
    assert code == 1
    assert "3 times in a row the same failure at the same place" in err
    kinds = [event["kind"] for event in events(tmp_path)]
    assert kinds == ["death", "restart", "death", "restart", "death", "crash loop"]


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (143, 143)])
def test_mistakes_and_stops_are_not_started_again(
    supervise: Supervise, tmp_path: Path, code: int, expected: int
) -> None:
    """A rank that was told to stop stops the others."""
    assert (
        ended(supervise(f"os._exit({code}) if rank else time.sleep(600)", restarts=3))[0]
        == expected
    )
    assert events(tmp_path) == []


GIVEN_TO_ANYBODY = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not GIVEN_TO_ANYBODY.exists(), reason="the range of ports is told by /proc")
def test_ranks_meet_at_a_port_that_nobody_else_is_given(
    supervise: Supervise, tmp_path: Path
) -> None:
    """It is chosen seconds before the first rank listens there."""
    assert ended(supervise("Path('port').write_text(os.environ['MASTER_PORT'])", ranks=1)) == (
        0,
        "",
    )
    first, last = map(int, GIVEN_TO_ANYBODY.read_text().split())
    port = int((tmp_path / "port").read_text())
    assert port in PORTS
    assert not first <= port <= last or first <= PORTS[0], "a machine may give away all"


def test_a_rank_that_fails_after_a_stop_is_not_started_again(
    supervise: Supervise, tmp_path: Path
) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    Path("ready").write_text("x")
    time.sleep(600)
    """
    process = supervise(body, ranks=1, restarts=3)
    assert waited((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 1
    assert "starting all ranks again" not in err
    assert [event["kind"] for event in events(tmp_path)] == ["death"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_everything_at_once(
    supervise: Supervise, tmp_path: Path, number: int
) -> None:
    body = """
    told = lambda *_: Path(f"told{rank}").write_text("x")
    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    Path(f"ready{rank}").write_text("x")
    while True:
        time.sleep(600)
    """
    process = supervise(body, restarts=3)
    assert waited(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    assert waited(lambda: all((tmp_path / f"told{rank}").exists() for rank in range(2))), (
        "the first one is passed on"
    )
    assert process.poll() is None
    process.send_signal(number)
    assert ended(process) == ({signal.SIGTERM: 143, signal.SIGINT: 130}[signal.Signals(number)], "")
