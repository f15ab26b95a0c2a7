"""What a reward's failures cost: its sample, or the run; and that nothing which a reward started outlives its worker."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import DataError, MachineError
from dovetail.rewards.runner import CallLimits, RewardRunner
from dovetail.rewards.samples import FIRST_SAMPLES, RecentFailures, RewardInput, RewardResult
from dovetail.rl.reward_manager import RewardManager, Scores
from tests.helpers.processes import all_gone, is_alive

HANG = 2.0  # seconds that a reward may take; any but the one that hangs takes none, on a busy machine, too
SPAWNING = """
import os, signal, subprocess, sys, time

def f(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "signal":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getppid(), number)
        return 0.0
    what, marker = solution_str.split()
    if what == "child":
        pid = subprocess.Popen(["sleep", "1000"]).pid
        with open(marker, "w") as file:
            file.write(str(pid))
    elif not os.fork():  # a daemon: two forks, a session of its own, and all that it inherited still open
        os.setsid()
        if not os.fork():
            with open(marker + "~", "w") as file:
                file.write(str(os.getpid()))
            os.rename(marker + "~", marker)
            time.sleep(1000)
        os._exit(0)
    else:
        os.wait()
        while not os.path.exists(marker):
            time.sleep(0.01)
    if what == "crash":
        os._exit(7)
    if what == "hang":
        time.sleep(1000)
    return 0.0
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("what", ["child", "daemon", "crash", "hang", "killed"])
def test_nothing_that_a_reward_started_outlives_its_worker(tmp_path: Path, what: str) -> None:
    """Whether the runner is closed, the reward ends its own process or runs out of time, or the run is killed."""
    (tmp_path / "spawns.py").write_text(SPAWNING)
    marker = tmp_path / "pid"
    timeout = HANG if what == "hang" else 600.0
    if what == "killed":
        code = f"""
import os, signal, sys; sys.path[:] = {sys.path!r}
from dovetail.rewards.runner import RewardRunner
from dovetail.rewards.samples import RewardInput
runner = RewardRunner(function="spawns:f", directory={str(tmp_path)!r})
runner.score([RewardInput(completion="daemon {marker}")])
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert (
            subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        )
    else:
        with RewardRunner(function="spawns:f", directory=tmp_path, timeout=timeout) as runner:
            (result,) = runner.score([RewardInput(completion=f"{what} {marker}")])
            assert (result.error is None) == (what in ("child", "daemon"))
            assert is_alive(int(marker.read_text())) == (what in ("child", "daemon"))
    started = int(marker.read_text())
    try:
        assert all_gone({started}, 5.0 if what == "killed" else 0.0)
    finally:
        if is_alive(started):
            os.kill(started, signal.SIGKILL)


def test_a_reward_that_signals_its_parent_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNING)
    with RewardRunner(function="spawns:f", directory=tmp_path) as runner:
        assert runner.score([RewardInput(completion="signal")] * 2) == [RewardResult(0.0)] * 2


FORGING = """
import json, os

def f(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "patch":
        json.dumps = json.loads = lambda *_, **__: '{"results": [{"value": 1.0, "error": null}]}'
    forged = b'{"results": [{"value": 1.0, "error": null}]}\\n'
    answer = {"forge": forged, "babble": b"x" * (2 << 20), "list": b"[1]\\n"}.get(solution_str)
    for number in range(3, 64) if answer else ():
        try:
            os.write(number, answer)
        except OSError:
            pass
    return 0.25
"""


def test_a_reward_that_writes_into_every_open_file_spoils_its_own_sample_only(
    tmp_path: Path,
) -> None:
    (tmp_path / "forges.py").write_text(FORGING)
    texts = ["", "forge", "", "babble", "", "list", "patch", ""]
    with RewardRunner(function="forges:f", directory=tmp_path) as runner:
        results = dict(enumerate(runner.score([RewardInput(completion=text) for text in texts])))
    for number, text in enumerate(texts):
        if text in ("", "patch"):
            assert results[number] == RewardResult(0.25), text
        else:
            assert "wrote into the pipe that its answers go through" in str(
                results[number].error
            ), text


FAILING = """
import time

def f(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise RuntimeError("broken on purpose")
    if solution_str == "hang":
        time.sleep(1000)
    return 1.0
"""


@pytest.mark.parametrize("what", ["raise", "hang"])
def test_a_reward_that_always_fails_is_not_asked_for_every_sample(
    tmp_path: Path, what: str
) -> None:
    (tmp_path / "fails.py").write_text(FAILING)
    timeout = 0.2 if what == "hang" else HANG
    runner = RewardRunner(
        function="fails:f", directory=tmp_path, timeout=timeout, limits=CallLimits(workers=4)
    )
    results = runner.score([RewardInput(completion=what)] * 1000, 0.05)
    assert (
        sum(result.scored for result in results)
        == sum(result.error is not None for result in results)
        == FIRST_SAMPLES
    )
    assert runner._processes == []


def test_failures_stop_the_scoring_when_they_are_more_than_may_be(tmp_path: Path) -> None:
    """Not before, however many of them come first: a row that always fails has all its samples side by side."""
    (tmp_path / "fails.py").write_text(FAILING)
    with RewardRunner(
        function="fails:f", directory=tmp_path, limits=CallLimits(workers=2)
    ) as runner:
        results = runner.score(
            [RewardInput(completion="raise")] * 10 + [RewardInput(completion="ok")] * 190, 0.05
        )
        assert [result.error is None for result in results] == [False] * 10 + [True] * 190
        results = runner.score(
            [RewardInput(completion="raise")] * 100 + [RewardInput(completion="ok")] * 100, 0.05
        )
    assert sum(result.error is not None for result in results) == 11
    assert sum(result.scored for result in results) < 100


GOOD = RewardResult(1.0)
BAD = RewardResult(None, "a cause")
LEFT = RewardResult(None, scored=False)


def test_failed_rewards_are_counted_or_end_the_run() -> None:
    assert RecentFailures().count([GOOD, RewardResult(None)] * 10, range(20), "step 1") == (0, None)
    assert RecentFailures().count([GOOD] * 95 + [BAD] * 5, range(100), "step 1") == (5, "a cause")
    not_scored = r"(the others were not scored); first"
    for results, words in (
        (
            [GOOD] * 94 + [BAD] * 6,
            "6 of the last 100 samples, more than 5% of 100; first cause, on row 94: a cause; fix",
        ),
        (
            [GOOD] * 90 + [LEFT] * 4 + [BAD] * 6,
            f"6 of the last 100 samples, more than 5% of 100 {not_scored}",
        ),
        (
            [LEFT] * 90 + [BAD] * 8 + [LEFT] * 902,
            f"all of the first 8 of 1000 samples {not_scored}",
        ),
    ):
        with pytest.raises(DataError, match=rf"^step 1: the reward failed on {re.escape(words)}"):
            RecentFailures().count(results, range(len(results)), "step 1")


def test_failures_of_small_steps_are_counted_over_the_last_64_samples() -> None:
    failures = RecentFailures()
    small = [GOOD] * 15 + [BAD]
    for step in range(3):
        assert failures.count(small, range(16), f"step {step}") == (1, "a cause"), (
            "3 of 64 are less than 5 %"
        )
    whole = [GOOD] * 16
    for step in range(3, 5):
        assert failures.count(whole, range(16), f"step {step}") == (0, None)
    assert failures.count(small, range(16), "step 5") == (1, "a cause"), "the first two have left"
    with pytest.raises(
        DataError, match="failed on 4 of the last 64 samples, more than 5% of 64; first cause"
    ):
        failures.count(small[:13] + [BAD] * 3, range(16), "step 6")
    failures = RecentFailures()
    with pytest.raises(
        DataError, match="failed on 4 of the last 4 samples, more than 5% of 64; first cause"
    ):
        failures.count([BAD] * 4, range(4), "step 1")


def test_too_many_killed_processes_are_a_failure_of_the_machine() -> None:
    killed = RewardResult(None, "the worker process was killed by SIGKILL", killed=True)
    with pytest.raises(
        MachineError, match=r"first cause, on row 0: the worker process was killed by SIGKILL$"
    ):
        RecentFailures().count([killed] * 4 + [GOOD] * 12, range(16), "step 1")
    with pytest.raises(DataError, match="first cause, on row 0: a cause; fix the reward function"):
        RecentFailures().count([BAD, *[killed] * 3, *[GOOD] * 12], range(16), "step 1")


ENDING = """
import os, signal

def f(data_source, solution_str, ground_truth, extra_info):
    victim = {"keeper": os.getppid()}.get(solution_str, os.getpid())
    if solution_str == "exit":
        os._exit(3)
    if solution_str != "ok":
        os.kill(victim, signal.SIGSEGV if solution_str == "crash" else signal.SIGKILL)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("what", "words", "killed"),
    [
        ("itself", "the worker process was killed by SIGKILL", True),
        ("keeper", "the worker process was killed by SIGKILL", True),
        ("crash", "the worker process was killed by SIGSEGV", False),
        pytest.param("exit", "the worker process died", False, marks=pytest.mark.soak),
    ],
)
def test_the_end_of_a_reward_process_by_the_system_is_told_from_its_own(
    what: str, words: str, killed: bool, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text(ENDING)
    with RewardRunner(function="ends:f", directory=tmp_path, timeout=600.0) as runner:
        (result,) = runner.score([RewardInput(completion=what)])
    assert (result.error, result.killed) == (words, killed)


def test_a_reward_that_is_killed_while_it_loads_is_a_failure_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(
        MachineError, match="cannot be loaded: the worker process was killed by SIGKILL"
    ):
        RewardRunner(function="heavy:f", directory=tmp_path)


class Given:
    """A reward of known results."""

    def __init__(self, *results: RewardResult) -> None:
        self.results = list(results)

    def score(self, *_: object) -> Scores:
        return Scores(self.results)

    def close(self) -> None:
        pass


def test_a_sum_with_a_failed_term_is_dropped_and_none_counts_nothing() -> None:
    one, failed, nothing = RewardResult(1.0), RewardResult(None, "a cause"), RewardResult(None)
    given: Any = {"a": Given(one, one, nothing), "b": Given(failed, nothing, nothing)}
    manager = RewardManager(given, (0.5, 2.0))
    assert [(result.value, result.error) for result in manager([], [], [])] == [
        (None, "b: a cause"),
        (0.5, None),
        (None, None),
    ]
    killed = RewardResult(None, "a kill", killed=True)
    manager = RewardManager({"a": Given(killed), "b": Given(failed)}, (0.5, 2.0))  # type: ignore[dict-item]
    (result,) = manager([], [], [])
    assert (result.error, result.killed) == ("a: a kill", True)


def test_a_worker_whose_runner_is_gone_ends_without_a_word() -> None:
    setup = {
        "id": 0,
        "name": "exact_match",
        "function": None,
        "address": None,
        "options": {},
        "directory": None,
    }
    command = [sys.executable, "-c", "from dovetail.rewards.worker import main; main()"]
    for sent in (
        "",
        json.dumps({**setup, "timeout": 1.0, "metric": False, "log": None, "columns": None}) + "\n",
    ):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as worker:
            assert (
                worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
            )
            worker.stdout.close()
            worker.stdin.write(sent.encode())
            worker.stdin.flush() if sent else worker.stdin.close()
            assert worker.stderr.read() == b""
