"""A reward that fails costs its sample; one that fails often stops the run with the first cause; both on every layout."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.program import here, on_ranks, read_rows, refusal, write_recipe, write_rows

HANG = 1.0  # seconds that a reward may take where one hangs; the others take none, on a busy machine, too
REWARD = """
import os, time

def judged(data_source, solution_str, ground_truth, extra_info):
    what, share = extra_info["what"], extra_info.get("share", 1.0)
    if share < 1.0 and extra_info["number"] % round(1 / share):
        return len(solution_str)
    if what == "raise":
        raise RuntimeError("broken on purpose")
    if what == "hang":
        time.sleep(1000)
    if what == "die":
        os._exit(3)
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "same": 0.5}[what]

def listed(prompts, completions, answer, what, **columns):
    assert len(prompts) == len(completions) == len(answer) == 1
    return [None if what[0] == "none" else float(len(completions[0]))]
"""


def make(folder: Path, model: Path, what: str, share: float = 1.0, **sections: Any) -> Path:
    """20 prompts of which `share` get what is asked for, one step of all of them."""
    (folder / "grader.py").write_text(textwrap.dedent(REWARD))
    rows = [
        {"prompt": "ab", "answer": i, "number": i, "what": what, "share": share} for i in range(20)
    ]
    return write_recipe(
        folder / "r.yaml",
        model,
        write_rows(folder / "rows.jsonl", rows),
        algorithm={"name": "grpo"},
        reward={
            "import": "grader:judged",
            "timeout_seconds": HANG if what == "hang" else 600,
            **sections.pop("reward", {}),
        },
        trainer={"steps": 2, "prompts_per_step": 20, "tokens_per_batch": 256},
        **sections,
    )


FAILURES = {
    "raise": "RuntimeError: broken on purpose",
    "nan": "the reward returned nan, which is not a finite number",
    "inf": "the reward returned inf, which is not a finite number",
    "text": "the reward returned '1.0', which is not a finite number",
    "die": "the worker process died",
    "hang": f"no answer within {HANG:g} s (reward.timeout_seconds); the worker was killed",
}


# What is no finite number is told by what checks the answers, of which tests/unit/test_rewards.py has all.
def kinds(*quick: str) -> list[Any]:
    return [pytest.param(what, marks=[pytest.mark.soak] * (what not in quick)) for what in FAILURES]


@pytest.mark.parametrize("what", kinds("nan", "hang"))
def test_one_failure_in_twenty_is_counted_and_survived(
    what: str, model: Path, tmp_path: Path
) -> None:
    recipe = make(tmp_path, model, what, share=0.05)
    ended = here("train", recipe, "trainer.steps=1")
    assert ended.code == 0, ended.err
    (row,) = read_rows(tmp_path / "run/metrics.jsonl")
    assert row["reward_errors"] == 2, "one prompt's two samples of 40"
    assert FAILURES[what] in row["reward_error"]
    assert ended.out.count(f"  2 rewards failed, the first: {FAILURES[what]}") == 1
    kept = read_rows(tmp_path / "run/rollouts/step_000001.jsonl")
    assert len(kept) == 38
    assert 0 not in {row["id"] for row in kept}


def test_failures_in_an_evaluation_are_counted_too(model: Path, tmp_path: Path) -> None:
    recipe = make(tmp_path, model, "raise", share=0.05)
    given = [f"data.eval={tmp_path / 'rows.jsonl'}", "trainer.eval_every=1"]
    ended = here("train", recipe, *given)
    assert ended.code == 0, ended.err
    assert "eval_reward_errors 1.000" in ended.out, "one prompt's only sample of 20"
    assert [row["eval_reward_errors"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [
        1,
        1,
    ]


@pytest.mark.parametrize("what", kinds("raise", "die"))
def test_more_than_one_in_twenty_stops_with_the_first_cause(
    what: str, model: Path, tmp_path: Path
) -> None:
    recipe = make(tmp_path, model, what, share=0.1)
    told = [refusal(here("train", recipe))]
    for layout in {"raise": ("dp=2",), "hang": ("dp=2",), "nan": ("tp=2",)}.get(what, ()):
        ended = on_ranks(2, "train", recipe, "--layout", layout, f"run_dir={tmp_path}/{layout}")
        assert len({(each.code, each.err) for each in ended}) == 1, ended
        told.append(refusal(ended[0]))
    for message in told:
        assert (
            "step 1: the reward failed on 4 of the last 40 samples, more than 5% of 64" in message
        )
        assert "; first cause, on row " in message
        assert f": {FAILURES[what]}" in message
        assert "; fix the reward function, or the rows that it fails on" in message


def test_none_drops_samples_without_an_error(model: Path, tmp_path: Path) -> None:
    recipe = make(tmp_path, model, "none", share=0.5)
    given = [f"data.eval={tmp_path / 'rows.jsonl'}", "--layout", "dp=2"]
    ended = on_ranks(2, "train", recipe, *given)
    assert [each.code for each in ended] == [0, 0]
    row = read_rows(tmp_path / "run/metrics.jsonl")[0]
    assert (row["reward_errors"], row["rewards_none"], row["eval_rewards_none_before"]) == (
        0,
        20,
        10,
    )
    assert "20 samples dropped: the reward returned None" in ended[0].out
    for name, count in (("rollouts", 40), ("eval", 20)):
        rows = read_rows(next((tmp_path / "run" / name).glob("step_*")))
        assert len(rows) == count
        assert sum(each["reward"] is None for each in rows) == count // 2


@pytest.mark.parametrize("function", ["judged", "listed"])
def test_a_step_without_any_sample_trains_nothing(
    function: str, model: Path, tmp_path: Path
) -> None:
    """And the third one in a row ends the run."""
    recipe = make(tmp_path, model, "none", reward={"import": f"grader:{function}"})
    given = [f"data.eval={tmp_path / 'rows.jsonl'}"] if function == "judged" else []
    ended = here("train", recipe, *given)
    assert ended.code == 0, ended.err
    assert (
        ended.out.count("no update: no sample has a reward, it returned None for all of them") == 2
    )
    assert ended.out.count(
        "warning: the reward returned None for every sample of data.eval"
    ) == len(given)
    for row in read_rows(tmp_path / "run/metrics.jsonl"):
        assert (row["loss"], row["grad_norm"], row["tokens"], row["reward_errors"]) == (
            None,
            0.0,
            0,
            0,
        )
    message = refusal(here("train", recipe, "trainer.steps=4", f"run_dir={tmp_path}/longer"))
    assert (
        f"step 3: 3 steps in a row have no sample with a reward, so that nothing is trained: grader:{function}"
        in message
    )


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("skip", [False, True])
def test_rewards_that_are_all_equal_give_the_advantage_0(
    algorithm: str, skip: bool, model: Path, tmp_path: Path
) -> None:
    recipe = make(tmp_path, model, "same")
    skipped = (
        skip and algorithm == "grpo"
    )  # then no token is trained, and the loss is a mean of nothing
    options = ["algorithm.drop_zero_std_groups=true"] if skipped else []
    assert here("train", recipe, f"algorithm.name={algorithm}", *options).code == 0
    for row in read_rows(tmp_path / "run/metrics.jsonl"):
        assert (row["loss"], row["grad_norm"], row["reward_mean"]) == (
            None if skipped else 0.0,
            0.0,
            0.5,
        )
        assert row["equal_groups"] == 1.0


def test_the_second_signature_gets_lists_and_columns(model: Path, tmp_path: Path) -> None:
    recipe = make(tmp_path, model, "raise", reward={"import": "grader:listed"})
    assert here("train", recipe).code == 0
    for row in read_rows(tmp_path / "run/rollouts/step_000001.jsonl"):
        assert row["reward"] == len(row["completion"])
