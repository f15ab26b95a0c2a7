"""Metrics of evaluations against their definitions, own metrics that fail, and what is refused."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from dovetail.cli.main import run_command
from dovetail.data.examples import Prompt
from dovetail.errors import ConfigError, UserError
from dovetail.factory.rewards import custom_metrics
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.evaluation import default_metrics
from dovetail.recipe.schema import make_recipe
from dovetail.rl.evaluation import EvalSet, average, majority, pass_at
from dovetail.rl.samples import Sample
from dovetail.sampler.turn import RolloutId, Turn
from tests.helpers.tolerances import OP_FP32


def sample(text: str, reward: float, group: int = 0, index: int = 0) -> Sample:
    prompt = Prompt(id=f"p{group}", ids=(1,), prompt="?", answer="7", columns={"level": group})
    return Sample(prompt, Turn(RolloutId(0, group, index), (1,), (0.0,), "stop"), text, reward)


def solved(pattern: Sequence[int]) -> list[Sample]:
    return [sample("", float(bit)) for bit in pattern]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int) -> None:
    for pattern in itertools.product((0, 1), repeat=n):
        for k in range(1, n + 1):
            expected = fmean(any(subset) for subset in itertools.combinations(pattern, k))
            assert pass_at(solved(pattern), k) == pytest.approx(expected, abs=OP_FP32)


def test_pass_at_k_of_many_samples_is_exact() -> None:
    assert pass_at(solved([1] + [0] * 9999), 5000) == 0.5
    assert pass_at([sample("", 0.999), sample("", 2.0)], 1) == 0.5, (
        "solved is a reward of 1 or more"
    )


def test_avg_at_k_is_of_the_first_samples() -> None:
    group = [sample("", reward) for reward in (0.25, 0.75, 5.0)]
    assert (average(group, 1), average(group, 2), average(group, 3)) == (0.25, 0.5, 2.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("7", 1), ("8", 0), ("so \\boxed{7}", 1)], [1, 1, 1]),  # 8 comes once, 7 twice
        (
            [("8", 0), ("7", 1), ("7.0", 1), ("8", 0), ("#### 8", 0)],
            [0, 0, 1, 0, 0],
        ),  # of a tie the first
        ([("a", 0), (" b ", 1), ("b", 1)], [0, 0, 1]),  # texts without a number
        (
            [("7", 0), ("7 ", 1), ("1", 1)],
            [0, 0, 0],
        ),  # the reward of the first sample with the answer
    ],
)
def test_maj_at_k_takes_the_most_frequent_answer(
    given: list[tuple[str, float]], expected: list[int]
) -> None:
    group = [sample(text, reward) for text, reward in given]
    assert [majority(group, k) for k in range(1, len(group) + 1)] == expected


def test_prompts_with_too_few_rewarded_samples_are_left_out() -> None:
    samples = [sample("1", 1.0, 0, 0), sample("2", 0.0, 0, 1), sample("3", 0.0, 1, 1)]
    metrics = ("avg@1", "avg@2", "pass@2", "maj@3")
    row = EvalSet(name="x", prompts=[], samples=3, metrics=metrics).measure(samples)
    assert list(row) == list(metrics)
    assert (row["avg@1"], row["avg@2"], row["pass@2"]) == (0.5, 0.5, 1.0)
    assert math.isnan(row["maj@3"])
    assert default_metrics(1) == ("avg@1", "pass@1") and default_metrics(4) == (
        "avg@4",
        "pass@4",
        "maj@4",
    )


MODULE = """
import time

def spread(prompts, completions, id, sample, reward, answer, level):
    assert len(completions) == len(prompts) == len(sample) == 4 and answer == ["7"] * 4 and level == [0, 0, 1, 1]
    return len(set(zip(id, completions))) / len(completions)

def each(solution_str, ground_truth, extra_info):
    return extra_info["reward"] * 2 if extra_info["sample"] else None

async def awaited(completions, **columns):
    return [float(len(text)) for text in completions]

def breaks(completions):
    raise RuntimeError("on purpose")

def hangs(completions):
    time.sleep(60)
"""
ENDS = """
def ends(completions):
    import os
    os.unlink(__file__)
    os._exit(3)
"""
SAMPLES = [
    sample("a", 1.0, 0, 0),
    sample("a", 0.0, 0, 1),
    sample("a", 0.5, 1, 0),
    sample("bcd", 1.0, 1, 1),
]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Any]:
    """Metrics by name, and what they say."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "gone.py").write_text(ENDS)
    with ExitStack() as stack:

        def make(*names: str) -> tuple[list[Any], list[str]]:
            said: list[str] = []
            solo = Mesh.solo(torch.device("cpu"))
            made = custom_metrics(names, solo, tmp_path, 1.0, said.append, stack)
            return list(made.values()), said

        yield make


def test_custom_metrics_give_one_number_or_one_a_sample(own: Any) -> None:
    (spread, each, awaited), said = own("mine:spread", "mine:each", "mine:awaited")
    assert (spread(SAMPLES), each(SAMPLES), awaited(SAMPLES)) == (0.75, 1.0, 1.5)
    assert spread.name == "spread" and said == []
    assert math.isnan(spread([]))


def test_a_bad_metric_ends_nothing(own: Any) -> None:
    """It raises, hangs, or ends its process and cannot be started again; the next evaluation asks it again."""
    (breaks, hangs, spread, ends), said = own(
        "mine:breaks", "mine:hangs", "mine:spread", "gone:ends"
    )
    for _ in range(2):
        assert all(math.isnan(metric(SAMPLES)) for metric in (breaks, hangs, ends))
    assert len(said) == 6
    for line, words in zip(
        said, ["on purpose", "no answer within 1 s", "cannot be loaded: "] * 2, strict=True
    ):
        assert (
            line.startswith("the metric ") and "failed, the run goes on: " in line and words in line
        )
    assert spread(SAMPLES) == 0.75


def test_a_metric_that_cannot_be_loaded_is_refused(own: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"^metric mine:missing, which is loaded as a reward: .*: module mine \(.*\) has no function 'missing'",
    ):
        own("mine:missing")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"data": "d"}, "eval.sets.name is missing; expected in names of metrics"),
        ({"name": "a"}, "eval.sets.data is missing; expected its rows"),
        ({"name": "a/b", "data": "d"}, "eval.sets: name is 'a/b'; expected letters, digits"),
        ({"name": "..", "data": "d"}, "eval.sets: name is '..'; expected letters"),
        (
            {"name": "a", "data": "d", "samples": 4},
            "samples is 4 and temperature 0, at which all samples of a prompt are",
        ),
        (
            {"name": "a", "data": "d", "samples": 0},
            "eval.sets.samples is 0; expected greater than or equal to 1",
        ),
        (
            {"name": "a", "data": "d", "temperature": -1},
            "eval.sets.temperature is -1; expected greater than or",
        ),
        (
            {"name": "a", "data": "d", "metrics": ["pass@2"]},
            "metrics has pass@2, but samples is 1; raise samples",
        ),
        (
            {"name": "a", "data": "d", "metrics": ["pass"]},
            "metrics has 'pass'; expected avg@K, pass@K, maj@K, or module",
        ),
        ({"name": "a", "data": "d", "metrics": "avg@0"}, "metrics has 'avg@0'; expected avg@K"),
        (
            {"name": "a", "data": "d", "metrics": ["m:f", "n:f"]},
            "metrics has f twice; leave one out",
        ),
        (
            {"name": "a", "data": "d", "sample": 2},
            "unknown key eval.sets.sample; did you mean eval.sets.samples?",
        ),
        (
            [{"name": "a", "data": "d"}, {"name": "A", "data": "e"}],
            "two sets are named 'a', in upper or lower case",
        ),
        ({"name": "eval", "data": "d"}, "data.eval is the set named eval; give another name"),
        ("d", "eval.sets is 'd'; expected a list"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(sets: Any, words: str) -> None:
    given = {
        "model": {"path": "M"},
        "data": {"train": "D", "eval": "E"},
        "run_dir": "R",
        "eval": {"sets": sets},
    }
    with pytest.raises(ConfigError) as refused:
        make_recipe(given)
    assert words in str(refused.value)


def test_supervised_runs_take_the_loss_of_a_set_alone() -> None:
    given = {
        "model": {"path": "M"},
        "data": {"train": "D"},
        "run_dir": "R",
        "algorithm": {"name": "sft"},
    }
    make_recipe({**given, "eval": {"sets": [{"name": "a", "data": "d"}]}})
    with pytest.raises(
        ConfigError,
        match=r"the set a has samples, temperature or metrics, but algorithm sft samples",
    ):
        make_recipe({**given, "eval": {"sets": [{"name": "a", "data": "d", "metrics": ["avg@1"]}]}})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reward", "exactmatch"], "--reward 'exactmatch' is no built-in reward"),
        (["--reward", ":f"], "--reward ':f': expected a built-in reward, or module:function"),
        (["--samples", "4"], "eval: samples is 4 and temperature 0"),
        (["--metrics", "avg@1,best"], "eval: metrics has 'best'; expected avg@K"),
        (["--samples", "x"], "argument --samples: invalid whole number value: 'x'"),
    ],
)
def test_wrong_flags_of_the_command_are_refused_before_ranks_start(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", "M", "--data", "D", "--device", "cpu", *flags]) == 2
    assert words in capsys.readouterr().err
