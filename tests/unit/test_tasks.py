"""One step of training: the batches of its samples, its metrics, and what ends a run."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from dovetail.batch.packed import PackedBatch
from dovetail.errors import CallbackError, ConfigError, DataError
from dovetail.parallel.mesh import Mesh
from dovetail.rewards.samples import RewardResult
from dovetail.rl.collect import step_rows
from dovetail.rl.samples import Sample, without_zero_std_groups
from dovetail.rl.step_metrics import mean, sample_metrics
from dovetail.rl.tasks import RLTask, inner_batches, weighted
from dovetail.run.callbacks import Callbacks, TrainerCallback, TrainerState
from tests.helpers.drawn import turn_of
from tests.helpers.task_batches import (
    SAMPLES,
    batch_of,
    dynamic,
    judging,
    pretended_ppo,
    recipe_of,
    report,
    with_advantages,
)
from tests.helpers.tolerances import OP_FP32, assert_close

RECIPE = recipe_of()


def test_the_mask_covers_the_predictions_of_the_response() -> None:
    batch = batch_of()
    assert batch.targets[batch.mask].tolist() == [1, 2, 3, 4, 8, 9, 8, 8, 8, 8, 2, 4]
    assert "temperature" not in batch.fields
    hot = batch_of(temperature=0.5)
    assert hot.fields["temperature"][hot.mask].tolist() == [0.5] * 12


@pytest.mark.parametrize(("epochs", "parts"), [(1, 1), (2, 1), (1, 2), (3, 4), (1, 5)])
def test_every_epoch_deals_every_sequence_once(epochs: int, parts: int) -> None:
    batch = weighted(
        batch_of().with_fields(number=batch_of().sequence_ids.to(torch.float32)), RECIPE
    )
    recipe = recipe_of(epochs=epochs, num_mini_batches=parts)
    inner = list(inner_batches(batch, recipe, step=3))
    assert len(inner) == epochs * parts
    orders = []
    for epoch in range(epochs):
        mine = inner[epoch * parts : (epoch + 1) * parts]
        dealt = [
            int(x) for part in mine for x in part.fields["number"][part.cu_seqlens[:-1].long()]
        ]
        assert sorted(dealt) == [0, 1, 2, 3, 4]
        assert (
            max(part.num_sequences for part in mine) - min(part.num_sequences for part in mine) <= 1
        )
        assert (
            sum((part.fields["weight"].sum() for part in mine), torch.zeros(())) == batch.mask.sum()
        )
        orders.append(dealt)
    again = [int(x) for part in inner_batches(batch, recipe, step=3) for x in part.fields["number"]]
    assert again == [int(x) for part in inner for x in part.fields["number"]]
    if parts == 4:
        assert len({tuple(order) for order in orders}) > 1, "every epoch is dealt anew"


def test_more_parts_than_sequences_leave_none_empty() -> None:
    inner = list(inner_batches(batch_of(), recipe_of(num_mini_batches=8), step=0))
    assert [part.num_sequences for part in inner] == [1] * 5


def test_rows_of_a_step_come_from_one_stream() -> None:
    seen: Counter[int] = Counter()
    for step in range(5):
        seen.update(step_rows(RECIPE, 10, step))
    assert set(seen.values()) == {2} and len(seen) == 10
    assert step_rows(recipe_of(shuffle=False), 10, 2) == [8, 9, 0, 1]


def test_operations_of_a_step_are_those_of_policy_and_critic() -> None:
    """Of all their updates; mfu is made of them."""
    row = pretended_ppo(report(1.0), report(10.0)).step(0)
    assert row is not None and row["flops"] == 4 * 1.0 + 4 * 10.0
    assert "critic_flops" not in row and row["critic_loss"] == 1.0
    assert "skipped" not in row


def test_evaluation_stops_and_bans_as_training_does() -> None:
    task = pretended_ppo(report(1.0), report(1.0))
    collector = task.collector
    given = collector.sampling = replace(collector.sampling, stop_ids=(2, 5), banned_ids=(7, 9))
    collector.held_out, sampler = collector.prompts, collector.sampler
    with mock.patch.object(sampler, "sample", wraps=sampler.sample) as sampled:
        task.step(0)
        task.evaluate(10)
    trained, evaluated = (call.args[1] for call in sampled.call_args_list)
    assert trained.stop_ids == evaluated.stop_ids == (2, 5)
    assert trained.banned_ids == evaluated.banned_ids == (7, 9)
    assert (trained.temperature, evaluated.temperature, evaluated.samples) == (
        given.temperature,
        0.0,
        1,
    )


class Judge(TrainerCallback):
    def __init__(self, judge: Callable[[list[Sample]], Any]) -> None:
        self.judge = judge

    def on_rollout_end(self, state: TrainerState, samples: list[Sample]) -> Any:
        return self.judge(samples)


def test_callbacks_replace_rewards_and_drop_samples() -> None:
    task, on = (
        pretended_ppo(report(1.0), report(1.0)),
        Callbacks(TrainerState(RECIPE, True), Mesh.solo()),
    )
    task.collector.rollout_end = on.replace_samples
    on.callbacks = [
        Judge(lambda samples: [replace(s, reward=float(s.group)) for s in samples if s.group != 1]),
        Judge(lambda _: None),
    ]
    row = task.step(0)
    assert row is not None and row["reward_mean"] == pytest.approx((0 + 2 + 3) / 3)
    assert [each["reward"] for each in task.sample_rows()] == [0.0, 2.0, 3.0] and row[
        "tokens"
    ] == 3 * 4
    on.callbacks = [Judge(lambda _: [])]
    row = task.step(1)
    assert row is not None and row["tokens"] == 0
    for judge, message in (
        (
            lambda samples: [s.reward for s in samples],
            "TypeError: expected None, or a list of samples it was given",
        ),
        (
            lambda samples: [replace(s, completion=turn_of((1,), row=9)) for s in samples],
            "TypeError: expected None, or a list of samples",
        ),
        (
            lambda samples: [replace(s, reward=math.nan) for s in samples],
            "ValueError: the reward nan of 1: not a finite number",
        ),
    ):
        on.callbacks = [Judge(judge)]
        with pytest.raises(
            CallbackError, match=f"Judge.on_rollout_end failed, after step 0 of 0: {message}"
        ):
            task.step(2)


def test_too_many_failed_rewards_of_an_evaluation_are_told_as_such() -> None:
    task = pretended_ppo(report(1.0), report(1.0))
    task.collector.held_out = task.collector.prompts
    failed = [RewardResult(None, "a cause")] * 4
    task.collector.rewards = judging(return_value=failed)
    with pytest.raises(
        DataError,
        match=r"^the evaluation after step 10: the reward failed on 4 of the last 4 .* a cause",
    ):
        task.evaluate(10)


def test_a_reward_that_gives_no_number_for_three_steps_ends_the_run() -> None:
    task = pretended_ppo(report(1.0), report(1.0))
    nothing = judging(return_value=[RewardResult(None)] * 4)
    nothing.name = "grader:f"
    managers: list[Any] = [nothing, nothing, task.collector.rewards, nothing, nothing]
    for step, task.collector.rewards in enumerate(managers):
        task.step(step)
    with pytest.raises(
        DataError,
        match=r"^step 6: 3 steps in a row have no sample with a reward.* grader:f returned None",
    ):
        task.step(5)


def test_a_skipped_update_of_the_critic_is_one_of_its_step() -> None:
    """A critic whose gradients are never finite would learn nothing, and the policy from what it says."""
    task = pretended_ppo(report(1.0), replace(report(10.0), skipped=True, faults={1: ["gradient"]}))
    row = task.step(0)
    assert row is not None and row["skipped"] is True
    assert row["fault"] == "the critic's update: not finite: rank 1: gradient"


def test_equal_rewards_have_themselves_for_a_mean() -> None:
    for count in (3, 10, 32):
        assert mean([0.7] * count) == 0.7, "or trainer.stop_at_reward=0.7 is missed by a rounding"
    assert mean([1.0, 2.0]) == 1.5
    assert math.isnan(mean([])) and math.isnan(mean([math.nan, 1.0]))


def test_groups_of_equal_rewards_are_dropped() -> None:
    assert [s.group for s in without_zero_std_groups(SAMPLES)] == [0, 0]
    assert without_zero_std_groups(SAMPLES[2:]) == []
    assert sample_metrics(SAMPLES, compared=True)["equal_groups"] == 2 / 3
    assert "equal_groups" not in sample_metrics(SAMPLES, compared=False)


def rolled(task: RLTask, step: int) -> tuple[list[Sample], Mapping[str, Any]]:
    found = task.collector.collect(step)
    assert found is not None
    return found


EQUAL, UNEQUAL = [1.0, 1.0], [0.0, 1.0]


def test_more_prompts_are_sampled_until_a_step_is_full() -> None:
    """Rows of the steps after the last one, in groups of their own; those beyond a full step are left out."""
    rewards = {
        0: EQUAL,
        1: UNEQUAL,
        2: EQUAL,
        3: EQUAL,
        4: EQUAL,
        5: EQUAL,
        6: UNEQUAL,
        7: UNEQUAL,
        8: UNEQUAL,
    }
    task, asked = dynamic(rewards, max_num_gen_batches=3)
    kept, row = rolled(task, 0)
    assert asked == [[0, 1], [2, 3]]  # step 0 and step 3 of rows 0 to 8: rows 0, 1 and 6, 7
    assert [(s.prompt.id, s.group, s.completion.sample) for s in kept] == [
        (1, 1, 0),
        (1, 1, 1),
        (6, 2, 0),
        (6, 2, 1),
    ]
    assert (
        len(task.collector.samples) == 8
        and row["work"]["rollout"] == (4 * 11, 8)
        and row["reward_mean"] == 5 / 8
    )
    task, asked = dynamic(dict.fromkeys(range(9), EQUAL), max_num_gen_batches=3)
    kept, row = rolled(task, 1)
    assert kept == [] and len(asked) == 3 and row["equal_groups"] == 1.0
    task, asked = dynamic(rewards)
    assert len(rolled(task, 0)[0]) == 2 and len(asked) == 1
    task, asked = dynamic(
        {0: [None, None], 1: UNEQUAL}, drop_zero_std_groups=False, max_num_gen_batches=3
    )
    assert (
        len(rolled(task, 0)[0]) == 2 and len(asked) == 1
    )  # whose reward failed is not sampled again


def test_a_stop_does_not_wait_for_more_prompts() -> None:
    """All ranks ask once between two batches, and nothing has changed."""
    asked_to_stop = mock.Mock(side_effect=[False, True])
    task, asked = dynamic(dict.fromkeys(range(9), EQUAL), max_num_gen_batches=3)
    assert task.step(0, asked_to_stop) is None and len(asked) == 2 and asked_to_stop.call_count == 2
    assert task.collector.samples == [] and task.collector.unrewarded == 0


def test_long_completions_are_punished_in_proportion() -> None:
    """Groups are still compared by what the reward said."""
    task, _ = dynamic({0: EQUAL, 1: UNEQUAL}, overlong_buffer=4, overlong_penalty=0.5)
    kept, row = rolled(task, 0)
    assert [s.reward for s in kept] == [
        0.0,
        1.0 - 0.5 * 3 / 4,
    ]  # 9 tokens of 10, of which 4 are the buffer
    assert [dict(s.rewards) for s in kept] == [
        {"reward": 0.0, "overlong": 0.0},
        {"reward": 1.0, "overlong": -0.375},
    ]
    assert row["reward/overlong"] == -0.1875 and row["reward_mean"] == 0.75 - 0.1875
    assert [s.reward for s in task.collector.samples] == [1.0, 0.625, 0.0, 0.625]
    with pytest.raises(
        ConfigError, match=r"overlong_buffer is 99, more than rollout.max_new_tokens=64"
    ):
        recipe_of(overlong_buffer=99)


def reference_gae(
    samples: Seq[Sample], batch: PackedBatch, gamma: float, lam: float, penalty: Any
) -> list[float]:
    """Advantage plus value of every response token by the definition: sums of discounted errors, in plain Python."""
    found, start = [], 0
    values = batch.fields["old_value"].tolist()
    for s in samples:
        n = len(s.completion.ids)
        first = start + len(s.prompt.ids) - 1  # where the response's first token is predicted
        v = [values[first + t] for t in range(n)] + [0.0]
        r = [(s.reward if t == n - 1 else 0.0) - penalty[first + t] for t in range(n)]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        found += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        start += len(s.prompt.ids) + n
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_values_advantages_and_returns_lie_where_the_prediction_is_made(
    gamma: float, lam: float, kl_coef: float
) -> None:
    torch.manual_seed(1)
    batch = batch_of()
    drawn = {
        name: torch.randn(len(batch)) for name in ("old_value", "old_logprob", "reference_logprob")
    }
    keys = {"gamma": gamma, "lam": lam, "kl_coef": kl_coef, "normalize_advantage": False}
    found = with_advantages(batch.with_fields(**drawn), SAMPLES, "ppo", **keys)
    penalty = (kl_coef * (drawn["old_logprob"] - drawn["reference_logprob"])).tolist()
    expected = torch.tensor(reference_gae(SAMPLES, batch.with_fields(**drawn), gamma, lam, penalty))
    mask = batch.mask
    assert_close(found.fields["advantage"][mask], expected, OP_FP32)
    assert_close(found.fields["return"][mask], expected + drawn["old_value"][mask], OP_FP32)
    assert not found.fields["advantage"][~mask].any() and not found.fields["return"][~mask].any()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_term_in_the_reward_is_summed_over_the_response(
    name: str, estimator: Literal["k1", "k2", "k3"]
) -> None:
    """The same as a lower reward; and without a coefficient there is none."""
    batch = batch_of()
    fields = {
        "old_logprob": torch.full((len(batch),), -1.0),
        "reference_logprob": torch.full((len(batch),), -1.5),
    }
    with_kl = with_advantages(
        batch.with_fields(**fields),
        SAMPLES,
        name,
        kl_in="reward",
        kl_estimator=estimator,
        kl_coef=0.1,
    )
    kl = {"k1": 0.5, "k2": 0.5**2 / 2, "k3": math.exp(-0.5) - 1 + 0.5}[estimator]
    lower = [replace(s, reward=s.reward - 0.1 * kl * len(s.completion.ids)) for s in SAMPLES]
    plain = with_advantages(batch, lower, name)
    assert_close(with_kl.fields["advantage"], plain.fields["advantage"], OP_FP32)
    assert not torch.equal(
        plain.fields["advantage"], with_advantages(batch, SAMPLES, name).fields["advantage"]
    )


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_large_rewards_that_differ_little_are_told_apart(name: str) -> None:
    """In float32, sums and means of such rewards would round their differences away."""
    far = with_advantages(batch_of(), [replace(s, reward=s.reward + 1e8) for s in SAMPLES], name)
    assert_close(
        far.fields["advantage"],
        with_advantages(batch_of(), SAMPLES, name).fields["advantage"],
        OP_FP32,
    )
    assert far.fields["advantage"].dtype == torch.float32


def test_a_sample_whose_group_was_dropped_around_it_learns_nothing() -> None:
    found = with_advantages(batch_of(), SAMPLES, "grpo")
    assert not found.fields["advantage"][found.sequence_ids == 4].any()
    assert found.fields["advantage"][(found.sequence_ids == 0) & found.mask].min() > 0
