"""What a real run does between its steps: inner updates, schedules, dropped samples, critics, and evaluations."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.golden.bodies import (
    closed_after_failure,
    critic_weights,
    held_out_loss,
    one_update,
    plain_gspo,
    record,
)
from tests.golden.job import MODEL, RL_ROWS, SFT_ROWS, play, rl, sft, write_inputs
from tests.helpers.harness import RankFailed, run
from tests.helpers.tolerances import CURVE_FP32, MODEL_FP32, SAME_POLICY_FP32

DIGITS = {"import": "digit_rewards:share_of_digits"}  # a random model gets some of it
ALWAYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second", "peak_memory_gib"
}  # fmt: skip
ALWAYS_IN_RL = ALWAYS | {
    "reward_mean", "response_length_mean", "entropy_mean", "kl_mean", "clip_fraction", "reward_errors",
    "rewards_none",
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("parts") / "inputs")


@pytest.fixture
def given(inputs: Path, tmp_path: Path) -> Any:
    """Makes a recipe of this test's own."""

    def make(name: str = "grpo", **sections: Any) -> dict[str, Any]:
        run_dir = tmp_path / sections.pop("folder", "run")
        return rl(inputs, run_dir, name, **{"reward": DIGITS, **sections})

    return make


def test_the_first_inner_step_is_on_policy_and_the_later_ones_are_not(given: Any) -> None:
    recorded = run(1, record, given(algorithm={"epochs": 3}, trainer={"steps": 2}))[0]
    deviations = [report.metrics["ratio_deviation"] for report in recorded.reports]
    assert len(deviations) == 6
    for first in (0, 3):
        assert deviations[first] <= SAME_POLICY_FP32
        assert min(deviations[first + 1 : first + 3]) > 100 * SAME_POLICY_FP32


def test_one_update_a_step_needs_no_old_log_probs(given: Any) -> None:
    recorded = run(1, record, given(trainer={"steps": 2}))[0]
    assert all("old_logprob" not in batch.fields for batch in recorded.batches)
    assert [report.metrics["ratio_deviation"] for report in recorded.reports] == [0.0, 0.0]


def test_the_reference_is_the_starting_policy(given: Any) -> None:
    kl = [row["kl_mean"] for row in run(1, record, given(algorithm={"kl_coef": 0.1}))[0].rows]
    assert abs(kl[0]) <= SAME_POLICY_FP32 and 100 * SAME_POLICY_FP32 < kl[1] < kl[2]


def test_without_a_reference_kl_is_taken_to_the_policy_that_sampled(given: Any) -> None:
    rows = run(1, record, given(algorithm={"epochs": 2}))[0].rows
    assert all(row["kl_mean"] == row["approx_kl"] > 0 for row in rows)


def test_the_schedule_counts_optimizer_steps(given: Any) -> None:
    recorded = run(
        1,
        record,
        given(
            algorithm={"epochs": 2, "num_mini_batches": 2},
            optim={"lr": 1e-3, "schedule": "linear", "warmup_steps": 1, "min_lr_ratio": 0.1},
        ),
    )[0]
    assert recorded.optimizer_steps == 12 and len(recorded.reports) == 12
    rates = [report.lr for report in recorded.reports]
    fall = [
        1e-3 - 9e-4 * k / 7 for k in range(8)
    ]  # to a tenth, after the 4 optimizer steps of the first training step
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, *fall])
    assert [row["lr"] for row in recorded.rows] == rates[3::4]


def test_critic_warmup_trains_the_critic_alone_and_leaves_the_schedule_whole(given: Any) -> None:
    recorded = run(
        1,
        record,
        given(
            "ppo",
            algorithm={"critic_warmup": 2},
            optim={"schedule": "linear"},
            trainer={"steps": 4},
        ),
    )[0]
    assert recorded.moved["policy"] == [
        False,
        False,
        True,
        False,
    ]  # the last of a linear schedule's rates is 0
    assert recorded.moved["critic"] == [True, True, True, False]
    assert recorded.optimizer_steps == 2 and [report.lr for report in recorded.reports] == [
        1e-3,
        0.0,
    ]
    assert [row["grad_norm"] > 0 for row in recorded.rows] == [False, False, True, True]
    assert [row["loss"] is None for row in recorded.rows] == [True, True, False, False]
    numbers = [v for row in recorded.rows for v in row.values() if isinstance(v, float)]
    assert not any(map(math.isnan, numbers))
    assert all(
        set(row) >= ALWAYS_IN_RL - {"peak_memory_gib"} and "critic_flops" not in row
        for row in recorded.rows
    )


def test_samples_that_the_reward_drops_are_not_trained(given: Any, tmp_path: Path) -> None:
    recorded = run(1, record, given(reward={"import": "digit_rewards:some"}))[0]
    for row, batch in zip(recorded.rows, recorded.batches, strict=True):
        file = tmp_path / "run" / "rollouts" / f"step_{row['step']:06}.jsonl"
        written = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [sample for sample in written if sample["reward"] is not None]
        assert len(written) == 32
        assert row["rewards_none"] == 32 - len(kept)
        assert 0 < len(kept) < 32 and batch.num_sequences == len(kept) and row["reward_errors"] == 0
        assert all(
            sample["completion"][:1] not in set("02468") or not sample["completion"]
            for sample in kept
        )
        assert row["tokens"] == sum(4 + len(sample["token_ids"]) for sample in kept)
        assert row["reward_mean"] == pytest.approx(
            sum(sample["reward"] for sample in kept) / len(kept)
        )


@pytest.mark.parametrize(
    ("sections", "reward"),
    [
        (
            {
                "reward": {"import": "digit_rewards:nothing"},
                "trainer": {"stop_at_reward": 0.0, "steps": 2},
            },
            math.nan,
        ),
        (
            {
                "reward": {"import": None, "name": "exact_match"},
                "algorithm": {"drop_zero_std_groups": True},
            },
            0.0,
        ),
    ],
    ids=["every sample dropped", "every group agrees"],
)
def test_a_step_may_leave_nothing_to_train(
    given: Any, sections: dict[str, Any], reward: float
) -> None:
    recorded = run(1, record, given(rollout={"max_new_tokens": 1}, **sections))[0]
    assert recorded.reports == [] and set(recorded.moved["policy"]) == {False}
    for row in recorded.rows:
        assert set(row) >= ALWAYS_IN_RL - {"peak_memory_gib"}
        assert (row["tokens"], row["grad_norm"]) == (0, 0.0)
        of_update = ("loss", "entropy_mean", "kl_mean", "clip_fraction")
        assert [row[key] for key in of_update] == [None] * 4
        assert row["reward_mean"] == pytest.approx(reward, nan_ok=True), (
            "not a number: nothing was judged"
        )


def test_rows_fit_the_micro_batches_of_every_model_or_are_refused_before_any_step(
    given: Any,
) -> None:
    """7 tokens fit the policy's 7; the critic's tp = 2 would pad them to 8."""
    trainer = {"tokens_per_batch": 7, "steps": 1, "prompts_per_step": 2}
    run(2, play, given("ppo", trainer=trainer, folder="fits"))
    with pytest.raises(RankFailed, match="4 tokens, but at most 3 fit"):
        run(2, play, given("ppo", trainer=trainer, critic={"layout": {"tp": 2}}, folder="refused"))
    assert not Path(given(folder="refused")["run_dir"]).exists()


def test_groups_that_agree_may_be_left_out(given: Any) -> None:
    recorded = run(
        1, record, given(algorithm={"drop_zero_std_groups": True}, rollout={"max_new_tokens": 1})
    )[0]
    sizes = [batch.num_sequences for batch in recorded.batches]
    assert all(0 < size < 32 and size % 4 == 0 for size in sizes), sizes
    for batch in recorded.batches:
        assert batch.fields["advantage"][batch.mask].abs().min() > 0


def test_a_reward_that_fails_stops_the_run_with_its_cause_and_leaves_nothing_open(
    given: Any,
) -> None:
    failure, metrics, rewards = run(
        1, closed_after_failure, given(reward={"import": "digit_rewards:broken"})
    )[0]
    assert (
        "step 1: the reward failed on 4 of the last 32 samples" in failure
        and "broken on purpose" in failure
    )
    assert metrics and rewards


def test_the_temperature_reaches_sampler_and_update_alike(given: Any) -> None:
    found = run(
        1, one_update, given(rollout={"temperature": 0.7}, algorithm={"epochs": 2}), noise=0.0
    )[0]
    pairs = list(zip(found["sampled"], found["scored"], strict=True))
    assert max(abs(a - b) for a, b in pairs) <= MODEL_FP32
    plain = run(
        1,
        one_update,
        given(rollout={"temperature": 1.0}, algorithm={"epochs": 2}, folder="plain"),
        0.0,
    )[0]
    assert (
        abs(found["report"].metrics["entropy_mean"] - plain["report"].metrics["entropy_mean"]) > 0.1
    )
    assert found["report"].metrics["ratio_deviation"] <= SAME_POLICY_FP32


def test_the_sampler_follows_a_policy_that_computes_wider_than_it_is_saved(
    given: Any, inputs: Path
) -> None:
    """float32 training of a bfloat16 checkpoint: rounded, small updates would not reach the samples at all."""
    saved = inputs.parent / "bfloat16"
    AutoModelForCausalLM.from_pretrained(inputs / MODEL, dtype=torch.bfloat16).save_pretrained(
        saved
    )
    AutoTokenizer.from_pretrained(inputs / MODEL).save_pretrained(saved)
    for steps in (0, 3):
        sections = {
            "model": {"path": str(saved)},
            "optim": {"lr": 1e-5},
            "algorithm": {"epochs": 2},
        }
        found = run(1, one_update, given(**sections, folder=f"after-{steps}"), 0.0, steps)[0]
        pairs = list(zip(found["sampled"], found["scored"], strict=True))
        assert max(abs(a - b) for a, b in pairs) <= MODEL_FP32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gspo_is_that_of_its_paper(given: Any, inputs: Path, temperature: float) -> None:
    recipe = given(
        algorithm={
            "ratio": "sequence",
            "aggregation": "sequence",
            "epochs": 2,
            "clip_low": 0.03,
            "clip_high": 0.05,
        },
        rollout={"temperature": temperature},
        trainer={"tokens_per_batch": 32},
    )
    found = run(1, one_update, recipe, noise=0.3)[0]
    loss, norm = plain_gspo(inputs / MODEL, found["batch"], (0.03, 0.05), temperature)
    assert 0.1 < found["report"].metrics["clip_fraction"] < 0.9, "both branches are seen"
    assert abs(found["report"].loss - loss) <= MODEL_FP32
    assert abs(found["report"].grad_norm / norm - 1) <= CURVE_FP32


def test_dr_grpo_divides_by_the_longest_response_allowed(given: Any) -> None:
    recipe = given(
        algorithm={"aggregation": "sequence_sum", "scale_by_std": False},
        rollout={"max_new_tokens": 5},
    )
    found = run(1, one_update, recipe, noise=0.2)[0]
    batch = found["batch"]
    rewards = torch.tensor(found["rewards"]).view(6, 4)
    assert found["groups"] == sorted(found["groups"])
    advantage = (rewards - rewards.mean(1, keepdim=True)).flatten()[batch.sequence_ids]
    scored = torch.zeros(len(batch)).masked_scatter(batch.mask, torch.tensor(found["scored"]))
    ratio = (scored - batch.fields["old_logprob"]).exp()
    token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    expected = float(token[batch.mask].sum()) / 5 / batch.num_sequences
    assert abs(found["report"].loss - expected) <= MODEL_FP32


def test_supervised_evaluation_is_the_held_out_loss(inputs: Path, tmp_path: Path) -> None:
    recipe = sft(
        inputs, tmp_path / "run", data={"eval": str(inputs / SFT_ROWS)}, trainer={"eval_every": 4}
    )
    played = run(1, play, recipe)[0]
    written = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(written) == 10 and all(set(row) >= ALWAYS for row in written)
    losses = [row["eval_loss"] for row in written if "eval_loss" in row]
    assert len(losses) == 3 and played.before["eval_loss"] > losses[0] > losses[1] > losses[2]
    assert (
        played.before["eval_loss"] == written[0]["eval_loss_before"]
        and played.after["eval_loss"] == losses[2]
    )
    for model, found in ((inputs / MODEL, played.before), (tmp_path / "run" / "hf", played.after)):
        expected = held_out_loss(model, inputs / SFT_ROWS)
        assert abs(found["eval_loss"] - expected) <= MODEL_FP32 * expected


def test_evaluation_is_greedy_and_changes_nothing(inputs: Path, tmp_path: Path) -> None:
    def recipe(name: str, **data: str) -> dict[str, Any]:
        trainer = {"eval_every": 1} if data else {}
        return rl(inputs, tmp_path / name, reward=DIGITS, data=data, trainer=trainer)

    plain = run(1, play, recipe("plain"))[0]
    seen = run(1, play, recipe("seen", eval=str(inputs / RL_ROWS)))[0]
    assert seen.ids == plain.ids and [r["loss"] for r in seen.rows] == [
        r["loss"] for r in plain.rows
    ]
    assert set(seen.before) == set(seen.after) == {"eval_reward_mean", "eval_solved"}
    assert seen.after == {name: seen.rows[-1][name] for name in seen.after}
    written = [
        json.loads(line) for line in (tmp_path / "seen" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(written) == 3 and all(
        set(row) >= ALWAYS_IN_RL | {"eval_reward_mean"} for row in written
    )


def test_the_fresh_value_head_is_the_same_on_every_rank_and_layout(given: Any) -> None:
    found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for layout in ({"tp": 1, "dp": 1}, {"tp": 2, "dp": 1}, {"tp": 1, "dp": 2}):
        recipe = given("ppo", layout=layout, folder=f"tp{layout['tp']}dp{layout['dp']}")
        for weights, stray, policy in run(layout["tp"] * layout["dp"], critic_weights, recipe):
            assert stray == 0.0
            found[str(layout), len(found)] = weights
            trunk = {name for name in weights if not name.startswith("score.")}
            assert trunk == {name for name in policy if name != "lm_head.weight"}
            assert all(torch.equal(weights[name], policy[name]) for name in trunk), (
                "the trunk is the policy's"
            )
    first, *others = found.values()
    heads = {name for name in first if name.startswith("score.")}
    assert heads and first["score.weight"].std() > 0
    assert all(torch.equal(other[name], first[name]) for other in others for name in heads)
    other_seed = given("ppo", trainer={"seed": 1}, folder="seed")
    assert not torch.equal(
        run(1, critic_weights, other_seed)[0][0]["score.weight"], first["score.weight"]
    )


@pytest.mark.soak  # its curve is among the committed ones, and GRPO learns in test_golden.py
def test_ppo_learns(inputs: Path, tmp_path: Path) -> None:
    """From half-taught: 40 steps of the graded reward raise it by more than a tenth."""
    run(1, play, sft(inputs, tmp_path / "sft", trainer={"steps": 25, "prompts_per_step": 32}))
    recipe = rl(
        inputs,
        tmp_path / "ppo",
        "ppo",
        model={"path": str(tmp_path / "sft" / "hf")},
        algorithm={"epochs": 2, "num_mini_batches": 2, "critic_warmup": 4},
        rollout={"samples_per_prompt": 8},
        trainer={"steps": 40, "prompts_per_step": 16},
    )
    rows = run(1, play, recipe)[0].rows
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.1, rewards
    assert rows[-1]["critic_loss"] < rows[0]["critic_loss"] / 2
