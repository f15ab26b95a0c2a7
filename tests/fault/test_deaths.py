"""A rank of `dovetail train` that is killed, at any phase: told with its name, and nothing is left of the others."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dovetail.launch.progress import Phase
from dovetail.system import children_of
from tests.helpers.processes import ENDLESS, all_gone, is_alive, rl_run, stopped_in, waited
from tests.helpers.program import program, read_rows, start, write_recipe, write_rows

SECONDS = 15.0  # from the death of a rank to the end of the command
IN_SHORT: tuple[tuple[Phase, int], ...] = (("reward", 0),)
AT_LENGTH: tuple[tuple[Phase, int], ...] = (
    ("init", 1), ("load", 0), ("save", 1), ("push", 1), ("rollout", 1), ("score", 0),
    ("update", 1), ("optimizer", 1), ("eval", 0), ("exit", 1), ("run", 0),
)  # fmt: skip


def started(
    phase: Phase, model: Path, folder: Path, attempt: int
) -> tuple[subprocess.Popen[str], Path]:
    """A command of two ranks that comes to the phase, with its temporary files in a folder of their own."""
    temporary = folder / f"tmp-{attempt}"
    if phase == "run":
        temporary.mkdir()
        rows = write_rows(folder / "ids.jsonl", [{"input_ids": list(range(200))}] * 2000)
        argv = [
            "score",
            "--model",
            model,
            "--data",
            rows,
            "--out",
            folder / "out",
            "--layout",
            "dp=2",
        ]
        return start(*argv, "--tokens-per-batch", 400, env={"TMPDIR": str(temporary)}), temporary
    flags = [f"run_dir={folder}/run-{attempt}", "--layout", "dp=2"]
    steps = 2 if phase == "exit" else ENDLESS
    return rl_run(
        model, folder, *flags, temporary=temporary.name, steps=steps, save_every=1, eval_every=1
    ), temporary


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="ranks are found by /proc")
@pytest.mark.parametrize(
    ("phase", "rank"),
    [*IN_SHORT, *(pytest.param(*case, marks=pytest.mark.soak) for case in AT_LENGTH)],
)
def test_a_killed_rank_is_named_with_its_phase_and_nothing_is_left(
    phase: Phase, rank: int, model: Path, tmp_path: Path
) -> None:
    for attempt in range(
        20
    ):  # the end of a command is short: the rank may be through before it is caught
        process, temporary = started(phase, model, tmp_path, attempt)
        pid = stopped_in(
            process, rank, phase, 1 if phase not in ("init", "load", "run") else 0, temporary
        )
        if pid is not None:
            break
        assert process.communicate()[0] is not None
    assert pid is not None
    below = children_of([process.pid])
    assert pid in below
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < SECONDS
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith(f"dovetail: rank {rank} ("), err
    assert f", pid {pid}) ended in phase {phase}" in line
    assert ": killed by SIGKILL: " in line
    if phase not in ("init", "load", "run"):
        assert f"phase {phase}, step " in line
        (event,) = [
            json.loads(row)
            for row in (tmp_path / f"run-{attempt}/events.jsonl").read_text().splitlines()
        ]
        assert (event["kind"], event["rank"], event["phase"]) == ("death", rank, phase)
    assert all_gone(below, 5.0)
    assert list(temporary.iterdir()) == []
    assert not [
        name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in below)
    ], "torch's names"


@pytest.mark.soak
def test_a_run_that_is_started_again_goes_on_and_ends_as_if_nothing_had_been(
    model: Path, tmp_path: Path
) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": f"{i}"} for i in range(9)]
    )
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, trainer={"steps": 40, "save_every": 4})
    (tmp_path / "tmp").mkdir()
    argv = ["train", recipe, "--layout", "dp=2"]
    process = start(*argv, "--restarts", 2, env={"TMPDIR": str(tmp_path / "tmp")})
    for step in (10, 25):
        pid = stopped_in(process, 1, "update", step, tmp_path / "tmp")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert waited(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]  # before the next one is looked for
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    events = [json.loads(row) for row in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] in ("death", "restart")] == [
        "death",
        "restart",
    ] * 2
    assert program(*argv, f"run_dir={tmp_path}/straight").code == 0
    found = [read_rows(tmp_path / name / "metrics.jsonl") for name in ("run", "straight")]
    assert [row["step"] for row in found[0]] == list(range(1, 41))
    assert [row["loss"] for row in found[0]] == [row["loss"] for row in found[1]]
