"""What a run says: its chart, its steps, its phases, and the log of each rank."""

import io
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.wrap import for_terminal
from dovetail.rl.step_metrics import EMPTY_UPDATE
from dovetail.run.console import WIDTH, Console, curve, log_path, note_failure, rank_log


def test_a_rising_curve_rises() -> None:
    lines = curve([0.0, 0.5, 1.0], height=2).splitlines()
    assert lines[0] == "   1.000 |  \u2588" and lines[1] == "   0.000 |\u2581\u2588\u2588"


def test_many_values_are_averaged_into_one_width() -> None:
    lines = curve([float(i) for i in range(10 * WIDTH)]).splitlines()
    assert all(len(line) == len("   0.000 |") + WIDTH for line in lines)


def test_values_that_are_not_finite_are_left_out() -> None:
    """A skipped update has no finite loss; the run must still end well."""
    assert curve([1.0, math.nan, 2.0, 3.0, math.inf]) == curve([1.0, 2.0, 3.0]) != ""


def test_what_has_no_shape_has_no_chart() -> None:
    assert curve([math.nan]) == curve([]) == curve([1.0, math.nan, 2.0]) == curve([0.25] * 9) == ""


def test_a_critic_shows_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    Console(speaks=True, steps=2).step(
        {"step": 1, "tokens": 9, "loss": 0.5, "critic_loss": 0.25, "lr": 1e-6}
    )
    assert capsys.readouterr().out.strip() == "step 1/2  loss 0.5000  critic 0.2500  lr 1.00e-06"


def test_an_evaluation_shows_in_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    for key, shown in (("eval_loss", "0.2500"), ("eval_reward_mean", "0.250")):
        Console(speaks=True, steps=2).step({"step": 1, "tokens": 9, "loss": 0.5, key: 0.25})
        assert capsys.readouterr().out.strip() == f"step 1/2  loss 0.5000  eval {shown}"


NOTHING = {
    **EMPTY_UPDATE,
    "step": 1,
    "response_length_mean": 4.0,
    "reward_mean": 0.5,
    "tokens_per_second": 0.0,
}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"equal_groups": 1.0},
            "no update: all samples of every prompt have equal rewards  reward 0.500  length 4.0",
        ),
        (
            {"reward_mean": math.nan, "response_length_mean": math.nan, "equal_groups": math.nan},
            "no update: no sample has a reward, it returned None for all of them",
        ),
        (
            {"tokens": 9, "loss": 0.0, "entropy_mean": 1.0, "kl_mean": 0.0, "equal_groups": 1.0},
            "all samples of every prompt have equal rewards  loss 0.0000  reward 0.500  grad 0  entropy 1.000  kl 0.0000  "
            "length 4.0  lr 0.00e+00  tok/s 0",
        ),
        (
            {"tokens": 9, "critic_loss": 0.25, "tokens_per_second": 3.0},
            "the critic alone  critic 0.2500  reward 0.500  length 4.0  tok/s 3",
        ),
        (
            {
                "tokens": 9,
                "skipped": True,
                "loss": math.nan,
                "entropy_mean": math.nan,
                "fault": "not finite: the loss",
                "equal_groups": 0.5,
                "tokens_per_second": None,
            },
            "UPDATE SKIPPED: not finite: the loss  loss nan  reward 0.500  grad 0  entropy nan  length 4.0  "
            "lr 0.00e+00",
        ),
    ],
)
def test_a_step_without_an_update_says_so_and_shows_no_numbers_of_it(
    row: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Console(speaks=True, steps=2).step({**NOTHING, **row})
    assert capsys.readouterr().out.strip() == f"step 1/2  {line}"


def test_nobody_has_to_listen() -> None:
    """A pipe that nobody reads any more, and a disk that is full: neither ends a run."""
    code = (
        "import sys; from dovetail.run.console import Console; c = Console(speaks=True, steps=1)\n"
    )
    code += "for _ in range(9): c.say('x' * 9999)\nsys.stderr.write('through')"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1].startswith("through")
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=pipe, text=True).stderr.startswith(
            "through"
        )


def test_a_phase_that_lasts_gets_a_line_a_minute_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("dovetail.run.console.time.monotonic", lambda: clock[0])
    console = Console(speaks=True, steps=2)
    console.phase("update", 0, 0, 0)
    for done in range(1, 151):
        clock[0] += 1.0
        console.phase("update", done, 200, 10 * done)
    assert capsys.readouterr().out.splitlines() == [
        "update 60 of 200 after 60 s  10 tokens/s",
        "update 120 of 200 after 120 s  10 tokens/s",
    ]


def test_a_rank_has_a_log_of_every_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_path(tmp_path, 1)
    with rank_log(path, "rank 1 of 2", quiet=True):
        sys.stdout.write("printed\n")
        sys.stderr.write("careful\n")
    with rank_log(path, "rank 1 of 2", quiet=False):
        sys.stdout.write("shown\n")
        sys.stderr.write("both\n")
    note_failure(path, ValueError("broken"))
    text = path.read_text()
    assert re.match(
        r"\S+: rank 1 of 2 on \S+, pid \d+\nprinted\ncareful\n.*\nboth\nValueError: broken\n$",
        text,
        re.DOTALL,
    )
    assert text.count("rank 1 of 2 on") == 2
    assert capsys.readouterr() == ("shown\n", "both\n")
    with rank_log(
        tmp_path / "logs/rank-1.log/no", "rank 1 of 2", quiet=False
    ):  # a run goes on without it
        sys.stdout.write("shown\n")
    assert capsys.readouterr() == ("shown\n", "")


ROW = {
    "step": 128, "tokens": 9, "loss": -0.0257, "reward_mean": 0.938, "grad_norm": 15.6,
    "entropy_mean": 0.196, "kl_mean": 0.0001, "response_length_mean": 1234.5, "lr": 1e-5,
    "tokens_per_second": 12345.0, "step_seconds": 120.5,
}  # fmt: skip


@pytest.mark.parametrize("columns", [80, 100])
def test_lines_fit_a_terminal_and_no_word_is_cut(
    columns: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    console = Console(speaks=True, steps=1000)
    console.log_to(tmp_path / "console.log")
    note = "memory   about 3.1 GiB a rank for weights, gradients, moments, sampler's weights; " * 2
    console.say(note.strip())
    console.step(ROW)
    console.step({**ROW, "rewards_none": 7, "eval/math/avg@8": 0.25})
    console.say(curve([float(i) for i in range(200)]))
    rows = [row.rstrip() for row in capsys.readouterr().out.splitlines()]
    assert all(len(row) <= columns for row in rows)
    assert rows[1].startswith(" " * len("memory   "))
    (step,) = [row for row in rows if row.startswith("step 128/1000  loss")]
    assert step.startswith("step 128/1000  loss -0.0257  reward 0.938")
    assert step.endswith("s 120.5")
    logged = (tmp_path / "console.log").read_text().splitlines()
    words = {word for line in logged for word in line.split()}
    assert {word for row in rows for word in row.split()} <= words
    assert len(logged[1]) > 100
    assert {"lr", "tok/s", "kl"} <= set(logged[1].split())


def test_what_is_no_terminal_gets_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Console(speaks=True, steps=1000).step(ROW)
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) > 100
    assert "lr 1.00e-05" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 100])
def test_the_header_is_cut_between_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    header = (
        "memory   about 3.1 GiB a rank for weights, gradients, moments, sampler's weights; more\n"
        * 2
    )
    header = header.replace("more", "activations come on top")
    rows = for_terminal(header, Terminal()).split("\n")
    assert all(len(row) <= columns for row in rows)
    assert rows[1].startswith(" " * len("memory   "))
    assert " ".join(" ".join(rows).split()) == " ".join(header.split())
    assert for_terminal(header, io.StringIO()) == header
