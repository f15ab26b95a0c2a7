"""What a reward function is called with: samples, groups or the whole step, at once or awaited."""

import textwrap
from pathlib import Path

import pytest

from dovetail.rewards.runner import CallLimits, RewardInput, RewardResult, RewardRunner

MODULE = """
import asyncio

def best_of(prompts, completions, **columns):
    lengths = [len(text) for text in completions]
    return [float(length == max(lengths)) for length in lengths]

def counts(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
    return [{"score": len(solution_strs)} for _ in solution_strs]

begun = []

async def slow(data_source, solution_str, ground_truth, extra_info):
    begun.append(solution_str)
    while len(begun) < 24 or solution_str == "hang":  # of all of them
        await asyncio.sleep(0.01)
    if solution_str == "raise":
        raise RuntimeError("broken on purpose")
    return float(len(solution_str))

async def slow_group(prompts, completions):
    await asyncio.sleep(0.1)
    return [len(completions)] * len(completions)

class Scorer:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return float(len(solution_str))

scorer = Scorer()

def wrapper(prompts, completions):
    return slow_group(prompts, completions)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_calls.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def samples(texts: list[str]) -> list[RewardInput]:
    return [RewardInput(completion=text, answer="42", prompt="?") for text in texts]


@pytest.mark.parametrize(
    ("function", "batch", "expected"),
    [
        ("best_of", "sample", [1, 1, 1, 1]),
        ("best_of", "group", [0, 1, 1, 0]),
        ("best_of", "step", [0, 1, 0, 0]),
        ("counts", "sample", [1, 1, 1, 1]),
        ("counts", "group", [2, 2, 2, 2]),
        ("counts", "step", [4, 4, 4, 4]),
        ("slow_group", "group", [2, 2, 2, 2]),
    ],
)
def test_a_function_gets_the_batch_that_it_asks_for(
    directory: Path, function: str, batch: str, expected: list[float]
) -> None:
    limits = CallLimits(batch=batch, workers=2)
    with RewardRunner(
        function=f"my_calls:{function}", directory=directory, limits=limits
    ) as runner:
        results = runner.score(samples(["a", "aaa", "bb", "b"]), groups=[0, 0, 1, 1])
    assert [result.value for result in results] == expected


def test_async_calls_run_at_the_same_time_and_fail_alone(directory: Path) -> None:
    """Each waits for all to have begun: one after the other none would end."""
    texts = ["a", "raise", "hang", *["bb"] * 21]
    with RewardRunner(
        function="my_calls:slow",
        directory=directory,
        timeout=2.0,
        limits=CallLimits(concurrency=24),
    ) as runner:
        results = runner.score(samples(texts))
    assert results[0] == RewardResult(1.0)
    assert str(results[1].error).startswith("RuntimeError: broken on purpose")
    assert (
        results[2].error
        == "no answer within 2 s; where it needs longer, raise reward.timeout_seconds"
    )
    assert results[3:] == [RewardResult(2.0)] * 21


def test_async_callables_are_awaited_and_coroutines_of_other_functions_are_not(
    directory: Path,
) -> None:
    with RewardRunner(function="my_calls:scorer", directory=directory) as runner:
        assert runner.score(samples(["abc"])) == [RewardResult(3.0)]
    with RewardRunner(function="my_calls:wrapper", directory=directory) as runner:
        told = "TypeError: my_calls:wrapper returned a coroutine; make the wrapper `async def`"
        assert runner.score(samples(["abc"]))[0].error == told


def test_no_more_async_calls_at_a_time_than_the_limit(directory: Path) -> None:
    (directory / "counted.py").write_text(
        textwrap.dedent("""
        import asyncio
        now = 0

        async def peak(data_source, solution_str, ground_truth, extra_info):
            global now
            now += 1
            seen = 0
            for _ in range(20):
                await asyncio.sleep(0.005)
                seen = max(seen, now)
            now -= 1
            return seen
        """)
    )
    with RewardRunner(
        function="counted:peak", directory=directory, limits=CallLimits(concurrency=3)
    ) as runner:
        assert [result.value for result in runner.score(samples(["x"] * 7))].count(3.0) == 6
