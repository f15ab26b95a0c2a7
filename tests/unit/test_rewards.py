"""Built-in rewards, both signatures of a user's function, and what a bad one cannot do to a run."""

import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.jsonl import json_line
from dovetail.rewards.built_in import (
    final_number,
    format_match,
    number_only,
    numbers,
    numeric_match,
)
from dovetail.rewards.runner import CallLimits, RewardRunner
from dovetail.rewards.samples import RewardInput, RewardResult

HANG = 2.0  # seconds that a reward may take; any but the one that hangs takes none, on a busy machine, too
MODULE = """
import json, os, sys, time

def verl_like(data_source, solution_str, ground_truth, extra_info):
    print("a print must not disturb the conversation", flush=True)
    assert data_source == "gsm" and extra_info["level"] == 3 and extra_info["finish"] == "stop"
    return 1.0 if solution_str == ground_truth else 0

def trl_like(prompts, completions, level, **columns):
    assert columns["answer"] == ["42"] and level == [3]
    return [len(p) + len(c) for p, c in zip(prompts, completions)]

def chat(prompts, completions):
    return [len(c[0]["content"]) + len(p) for p, c in zip(prompts, completions)]

def weighted(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    return factor * len(solution_str)

def by_text(data_source, solution_str, ground_truth, extra_info):
    what = solution_str
    if what == "raise":
        raise RuntimeError("broken on purpose")
    if what == "exit":
        sys.exit(3)
    if what == "crash":
        os._exit(7)
    if what == "note":
        with open(os.path.join(os.path.dirname(__file__), "begun"), "a") as file:
            print(time.monotonic(), file=file)
    if what in ("hang", "note"):
        time.sleep(1000)
    if what == "read":
        return len(sys.stdin.read())
    return {"nan": float("nan"), "inf": float("-inf"), "none": None, "text": "1.0", "list": [1.0], "bool": True,
            "big": 10**400, "secret": object()}.get(what, 0.5)

def as_verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": {"none": None, "text": "1.0"}.get(solution_str, 0.5), "acc": 1.0} if solution_str else {"acc": 1.0}

async def later(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def parses(prompts, completions):
    return [json.loads(text)["a"] for text in completions]

def of_verl(data_source, solution_str, ground_truth, tokenizer):
    return 1.0

def of_trl(completions, environments, **columns):
    return [1.0] * len(completions)

def unnamed(completions, prompts, /):
    return [1.0] * len(completions)

def by_column(completions, solution, **columns):
    return [1.0] * len(completions)

def neither(x, y):
    return 1.0

def two_for_one(prompts, completions):
    return [1.0, 2.0]

def no_list(prompts, completions):
    return None if completions == ["nothing"] else 0.5

not_a_function = 3
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import does_not_exist\n")
    return tmp_path


def sample(completion: str, **more: object) -> RewardInput:
    columns = {"data_source": "gsm", "level": 3}
    return RewardInput(completion=completion, answer="42", prompt="What?", columns=columns, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it costs $1,234.50 in all", ["1234.5"]),
        ("54, 94, 2", ["54", "94", "2"]),
        ("54,94,2", ["54", "94", "2"]),
        ("-7 and 7 - 5, 3-2 x=-5", ["-7", "7", "5", "3", "2", "-5"]),
        ("3/4 of .5, 1/0", ["3/4", "1/2", "1", "0"]),
        (r"\frac{3}{4} or -\dfrac{1}{2}", ["3/4", "-1/2"]),
        (
            r"\displaystyle\frac{1}{2}, 3\cdot\frac{3}{4}, 5-\frac{1}{2}",
            ["1/2", "3", "3/4", "5", "1/2"],
        ),
        (r"2\frac{1}{2}", ["2", "1/2"]),
        (
            r"1{,}200 and 36,\!000 and 1\,234\,567.5 of (3,\,400)",
            ["1200", "36000", "1234567.5", "3", "400"],
        ),
        (r"12\text{ cm}^2, 5 m^{-2}, x^2-5, 10^6/2", ["12", "5", "5", "10", "2"]),
        ("2e-3 and 1e9999", ["1/500", "1"]),
        ("the answer is 94.", ["94"]),
        ("abc94 v2.0 x_3", []),
        ("\u22127", ["-7"]),
        ("9" * 5000, []),
        ("", []),
    ],
)
def test_numbers(text: str, expected: list[str]) -> None:
    assert numbers(text) == [Fraction(x) for x in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 + 2 = 4\n#### 42", "42"),
        ("#### 1,000 apples, not 7", "1000"),
        (r"so \boxed{\frac{1}{2}} and 3 more", "1/2"),
        (r"\boxed{1} then \boxed{x = 2}", "2"),
        (r"\boxed{12\text{ cm}^2}", "12"),
        ("first 3 then 5", "5"),
        (r"#### 7, so \boxed{8}", "8"),
        ("none", None),
    ],
)
def test_final_number(text: str, expected: str | None) -> None:
    assert final_number(text) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("I get 42", 42, 1.0),
        ("42.0", "#### 42", 1.0),
        ("0.5", "1/2", 1.0),
        ("0.3333333", "1/3", 1.0),
        ("0.33", "1/3", 0.0),
        ("1000000.5", 1000000, 1.0),
        ("41", 42, 0.0),
        ("", 42, 0.0),
    ],
)
def test_numeric_match(completion: str, answer: object, expected: float) -> None:
    assert numeric_match(completion, answer, "stop") == expected


@pytest.mark.parametrize(
    ("completion", "finish", "expected"),
    [
        (" 94.", "stop", 1.0),
        ("94", "stop", 1.0),
        ("94", "length", 0.1),
        ("94!", "stop", 0.3),
        (" the 94", "stop", 0.3),
        (" 94, not 2", "stop", 0.1),
        (" 54, 94", "length", 0.1),
        ("9", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_number_only(completion: str, finish: str, expected: float) -> None:
    assert number_only(completion, "94", finish) == expected


def test_format() -> None:
    assert format_match("<think>a\nb</think>\n<answer>3</answer>", None, "stop") == 1.0
    assert format_match("<answer>3</answer>", None, "stop") == 0.0
    assert format_match("yes", None, "stop", pattern="yes|no") == 1.0


def test_built_ins_run_in_workers_and_keep_the_order() -> None:
    with RewardRunner("exact_match", limits=CallLimits(workers=2)) as runner:
        results = runner.score(
            [RewardInput(completion=str(i), answer=str(i % 3)) for i in range(9)]
        )
        assert results == [RewardResult(float(i < 3)) for i in range(9)]
        assert runner.score([]) == []
    with RewardRunner("format", options={"pattern": "a+"}) as runner:
        assert [r.value for r in runner.score([sample("aaa"), sample("b")])] == [1.0, 0.0]


def test_both_signatures(directory: Path) -> None:
    def score(function: str, samples: list[RewardInput], **options: float) -> list[RewardResult]:
        with RewardRunner(
            function=f"my_rewards:{function}", directory=directory, options=options
        ) as runner:
            return runner.score(samples)

    assert score("verl_like", [sample("42"), sample("41")]) == [
        RewardResult(1.0),
        RewardResult(0.0),
    ]
    assert score("trl_like", [sample("abc"), sample("")]) == [RewardResult(8.0), RewardResult(5.0)]
    assert score("weighted", [sample("abc")], factor=2.0) == [RewardResult(6.0)]
    messages = [{"role": "user", "content": "hello"}]
    assert score("chat", [RewardInput(completion="abc", prompt=messages)]) == [RewardResult(4.0)]
    (result,) = score("two_for_one", [sample("x")])
    assert result.value is None
    assert "list of 1 reward" in str(result.error)


def test_bytes_of_a_row_are_the_text_that_they_hold() -> None:
    with RewardRunner("exact_match") as runner:
        results = runner.score(
            [RewardInput(completion=text, answer=text.encode()) for text in ("42", "\u00e9")]
        )
    assert [result.value for result in results] == [1.0, 1.0]
    assert json_line({"answer": b"\xc3\xa9\xff"}) == '{"answer": "\u00e9\\\\xff"}\n'


def test_a_mapping_gives_its_score(directory: Path) -> None:
    with RewardRunner(function="my_rewards:as_verl", directory=directory) as runner:
        number, none, text, lacking = runner.score(
            [sample("x"), sample("none"), sample("text"), sample("")]
        )
    assert (number, none) == (RewardResult(0.5), RewardResult(None))
    assert text.error == "the reward returned '1.0', which is not a finite number"
    assert lacking.error == "the reward returned {'acc': 1.0}, a mapping without 'score'"


def test_messages_name_lines_of_the_user_only(directory: Path) -> None:
    """Not those of the library that the reward calls, nor ours, where a built-in or the form of an answer is at fault."""
    line = 1 + MODULE.splitlines().index(
        '    return [json.loads(text)["a"] for text in completions]'
    )
    with RewardRunner(function="my_rewards:parses", directory=directory) as runner:
        bad, missing = runner.score([sample("{"), sample("{}")])
    for result, kind in ((bad, "JSONDecodeError: "), (missing, "KeyError: ")):
        assert str(result.error).startswith(kind)
        assert str(result.error).endswith(f" ({directory}/my_rewards.py:{line})")
    with RewardRunner(function="my_rewards:two_for_one", directory=directory) as runner:
        assert (
            runner.score([sample("x")])[0].error
            == "ValueError: expected a list of 1 reward for 1 completion, got 2"
        )
    with RewardRunner(function="my_rewards:no_list", directory=directory) as runner:
        for text, got in (("x", "0.5"), ("nothing", "None")):
            told = f"TypeError: expected a list of 1 reward for 1 completion, got {got}"
            assert runner.score([sample(text)])[0].error == told
    with RewardRunner("numeric_match") as runner:
        assert runner.score([RewardInput(completion="1", answer="none")])[0].error == (
            "ValueError: the answer 'none' holds no number"
        )
    with pytest.raises(
        ConfigError, match=rf"No module named 'does_not_exist' \({directory}/broken.py:1\)$"
    ):
        RewardRunner(function="broken:f", directory=directory)
    with pytest.raises(ConfigError, match=r"No module named 'nowhere'$"):
        RewardRunner(function="nowhere:f", directory=directory)


def test_what_a_reward_may_not_do_drops_its_sample_only(directory: Path) -> None:
    texts = [
        "ok",
        "raise",
        "exit",
        "crash",
        "hang",
        "nan",
        "inf",
        "none",
        "text",
        "list",
        "big",
        "secret",
        "read",
    ]
    with RewardRunner(function="my_rewards:by_text", directory=directory, timeout=HANG) as runner:
        results = dict(zip(texts, runner.score([sample(text) for text in texts]), strict=True))
        assert runner.score([sample("ok"), sample("bool")]) == [
            RewardResult(0.5),
            RewardResult(1.0),
        ]
    assert results["ok"] == RewardResult(0.5)
    assert results["read"] == RewardResult(0.0), "standard input is empty"
    assert results["none"] == RewardResult(None), "None drops a sample without being an error"
    causes = {
        "raise": "RuntimeError: broken on purpose",
        "exit": "SystemExit: 3",
        "crash": "died",
        "hang": f"no answer within {HANG:g} s (reward.timeout_seconds); the worker was killed",
        "nan": "not a finite number",
        "inf": "not a finite number",
        "text": "not a finite number",
        "list": "TypeError",
        "big": "OverflowError",
        "secret": "TypeError",
    }
    for text, words in causes.items():
        assert results[text].value is None
        assert words in str(results[text].error), text
    assert "my_rewards.py:" in str(results["raise"].error), "the cause names the user's line"
    assert sum(result.error is not None for result in results.values()) == len(causes)


def test_hanging_samples_do_not_wait_for_each_other(directory: Path) -> None:
    with RewardRunner(
        function="my_rewards:by_text",
        directory=directory,
        timeout=HANG,
        limits=CallLimits(workers=3),
    ) as runner:
        results = runner.score([sample("note")] * 3 + [sample("ok")])
    assert [r.value for r in results] == [None, None, None, 0.5]
    begun = [float(line) for line in (directory / "begun").read_text().split()]
    assert len(begun) == 3
    assert max(begun) - min(begun) < HANG, (
        "one after the other, each would begin when the one before is given up"
    )


@pytest.mark.parametrize("timeout", [3e6, 1e300])
def test_a_timeout_beyond_what_the_system_counts_is_no_limit(timeout: float) -> None:
    with RewardRunner("exact_match", timeout=timeout) as runner:
        assert runner.score([RewardInput(completion="42", answer="42")]) == [RewardResult(1.0)]


def test_a_regular_expression_that_never_ends_is_killed() -> None:
    with RewardRunner("format", options={"pattern": "(a+)+b"}, timeout=HANG) as runner:
        first, second = runner.score([sample("a" * 64), sample("ab")])
    assert first.value is None
    assert second.value == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "exact_mach"}, "did you mean 'exact_match'"),
        ({"function": "nowhere:f"}, "No module named 'nowhere'"),
        ({"function": "broken:f"}, "does_not_exist"),
        (
            {"function": "my_rewards:absent"},
            r"module my_rewards \(.*/my_rewards.py\) has no function 'absent'",
        ),
        ({"function": "my_rewards:not_a_function"}, "no function 'not_a_function'"),
        ({"function": "my_rewards:neither"}, "neither signature"),
        (
            {"function": "my_rewards:of_verl"},
            "my_rewards:of_verl needs tokenizer, which no reward is given; it gets data_so",
        ),
        (
            {"function": "my_rewards:of_trl"},
            "needs environments, which no reward is given; it gets prompts, completions",
        ),
        (
            {"function": "my_rewards:unnamed"},
            "takes completions, prompts by position only, but is called by names; drop the /",
        ),
        (
            {"name": "format", "options": {"pattern": "("}},
            r"reward.options.pattern '\(' is no regular expression: missing",
        ),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(
    directory: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        RewardRunner(**{"directory": directory, **arguments})


def test_a_column_that_rows_lack_is_named(directory: Path) -> None:
    with RewardRunner(function="my_rewards:by_column", directory=directory) as runner:
        told = "TypeError: my_rewards:by_column needs solution, but the rows give data_source, level, answer, finish, prompts"
        assert str(runner.score([sample("x")])[0].error).startswith(told)


def test_neither_the_parent_side_nor_the_worker_loads_torch() -> None:
    code = "import sys, dovetail.rewards.runner, dovetail.rewards.worker; sys.exit('torch' in sys.modules)"
    path = f"import sys; sys.path[:] = {sys.path!r}; "
    assert subprocess.run([sys.executable, "-c", path + code], check=False).returncode == 0
