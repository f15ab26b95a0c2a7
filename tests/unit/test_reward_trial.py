"""Rewards are loaded, compared with the rows and called once, before any rank and before the header."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import run_command
from tests.helpers.first_rows import GOOD, USER, started as started, write

__all__ = ["started"]
MODULE = """
import time

def good(data_source, solution_str, ground_truth, extra_info):
    print("LOUD")
    return float(solution_str == ground_truth == "4")

def fails(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 0

def mistyped(completions, **columns):
    return ["good" for _ in completions]

def by_level(completions, level):
    return [float(x) for x in level]

def short(completions, **columns):
    return [1.0]

def spread(completions, **columns):
    return [1.0 / (len(completions) - 1)] * len(completions)

def slow(completions, **columns):
    time.sleep(60)

def nothing(completions, **columns):
    return [None for _ in completions]

async def paid(completions, **columns):
    raise RuntimeError("each call costs money")
"""


@pytest.mark.parametrize(
    ("function", "row", "words"),
    [
        ("good", GOOD, ""),
        ("nothing", GOOD, ""),
        ("spread", GOOD, ""),
        ("paid", GOOD, ""),
        ("by_level", {**GOOD, "level": 3}, ""),
        (
            "by_level",
            GOOD,
            "mine:by_level needs level, but the rows give prompts, completions, answer, finish\n",
        ),
        (
            "fails",
            GOOD,
            "mine:fails was tried on D.jsonl:1 with the completion '4': ZeroDivisionError: division by",
        ),
        (
            "mistyped",
            GOOD,
            "the reward returned 'good', which is not a finite number; correct the function",
        ),
        ("short", {**GOOD, "prompt": "a"}, "expected a list of 8 rewards for 8 completions, got 1"),
        ("absent", GOOD, "mine.py has no function 'absent'"),
    ],
)
def test_a_function_is_tried_on_the_first_row(
    function: str, row: Any, words: str, started: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(MODULE)
    write(row)
    batch = "group" if function in ("short", "spread") else "sample"
    argv = ["train", "R.yaml", f"reward.import=mine:{function}", f"reward.batch={batch}"]
    assert run_command(argv) == (2 if words else 0)
    told = capfd.readouterr()
    assert words in told.err
    assert "LOUD" not in told.out + told.err
    assert bool(started) is not bool(words)
    assert bool(told.out) is not bool(words), "the header"


def test_a_function_that_fails_on_some_rows_is_not_refused(started: list[object]) -> None:
    Path("mine.py").write_text(MODULE)
    write({**GOOD, "level": "high"}, {**GOOD, "level": 3})
    assert run_command(["train", "R.yaml", "reward.import=mine:by_level"]) == 0
    assert started


@pytest.mark.usefixtures("started")
def test_a_slow_function_is_left_alone_after_a_second() -> None:
    Path("mine.py").write_text(MODULE)
    write(GOOD)
    begun = time.monotonic()
    assert run_command(["train", "R.yaml", "reward.import=mine:slow"]) == 0
    assert time.monotonic() - begun < 30


def test_columns_of_every_file_are_compared(
    started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(MODULE)
    write({**GOOD, "level": 3})
    write(GOOD, name="held.jsonl")
    argv = ["train", "R.yaml", "reward.import=mine:by_level"]
    assert run_command([*argv, "data.eval=held.jsonl"]) == 2
    assert "needs level" in capsys.readouterr().err
    assert not started


def test_a_built_in_is_tried_too(started: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    write({"prompt": [USER], "answer": json.dumps({"inputs": ["1"], "outputs": []})})
    Path("M/chat_template.jinja").write_text("{{ messages }}")
    assert run_command(["train", "R.yaml", "reward.name=code"]) == 2
    assert "reward code was tried on D.jsonl:1" in capsys.readouterr().err
    write(GOOD)
    assert run_command(["train", "R.yaml", "reward={name: format, options: {patern: x}}"]) == 2
    assert "reward.options has patern" in capsys.readouterr().err
    assert not started
