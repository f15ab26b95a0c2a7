"""What a reward function is called with: samples, groups or the whole step, at once or awaited."""

import textwrap
from pathlib import Path

import pytest

from dovetail.rewards.runner import CallLimits, RewardRunner
from dovetail.rewards.samples import RewardInput, RewardResult, TrainingProgress

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

def as_in_trl(completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    assert trainer_state.is_world_process_zero and trainer_state.num_train_epochs == 2
    log_metric("mean_ids", sum(map(len, completion_ids)) / len(completion_ids))
    log_metric("step", trainer_state.global_step)
    log_extra("ids", [ids[-1] for ids in completion_ids])
    return [trainer_state.epoch for _ in completions]

def uneven(completions, log_extra):
    log_extra("too_few", [])
    return [1.0]

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
    assert results[2].error == "no answer within 2 s (reward.timeout_seconds)"
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


def test_trl_arguments_of_the_trainer(directory: Path) -> None:
    """Ids of each completion, fields of TrainerState, and what is logged for a step or a sample."""
    given = [
        RewardInput(completion=text, completion_ids=ids)
        for text, ids in (("a", (5,)), ("b", (6, 7)), ("c", (8, 9, 10)))
    ]
    progress = TrainingProgress(global_step=3, max_steps=4, epoch=1.5, num_train_epochs=2)
    limits = CallLimits(batch="group")
    with RewardRunner(function="my_calls:as_in_trl", directory=directory, limits=limits) as runner:
        results = runner.score(given, groups=[0, 0, 1], progress=progress)
        metrics = sorted(runner.metrics)
        runner.score([], progress=progress)
        assert runner.metrics == []
    assert [result.value for result in results] == [1.5] * 3
    assert [dict(result.extra) for result in results] == [{"ids": 5}, {"ids": 7}, {"ids": 10}]
    assert metrics == [("mean_ids", 1.5), ("mean_ids", 3.0), ("step", 3.0), ("step", 3.0)]


def test_extra_columns_have_a_value_for_each_sample(directory: Path) -> None:
    with RewardRunner(function="my_calls:uneven", directory=directory) as runner:
        (result,) = runner.score(samples(["a"]))
    assert str(result.error).startswith(
        "ValueError: log_extra expects 1 values, got 0 for 'too_few' ("
    )
