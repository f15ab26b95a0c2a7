"""Importance weights against a transcription by token in plain Python, what a step does with them, and what it measures."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.engine.base import StepReport
from dovetail.errors import ConfigError, DataError
from dovetail.recipe.algorithms import CorrectionSection
from dovetail.recipe.schema import Recipe, check_correction, make_recipe
from dovetail.rl.correction import importance_weights, lag_metrics, mismatch
from dovetail.rl.experience import pack_samples
from dovetail.rl.losses import Aggregation, PolicyLoss, weight_fields
from dovetail.rl.samples import sample_row
from dovetail.rl.tasks import RLTask
from tests.helpers.loss_batches import (
    F64,
    LENGTHS,
    MASKS,
    clip_formula,
    counted,
    full_batch,
    random_stats,
)
from tests.helpers.task_batches import SAMPLES, dynamic, pretended_ppo, recipe_of
from tests.helpers.tolerances import OP_FP32, SUM_ORDER, assert_close, assert_sum_close

Ratio = Literal["token", "sequence", "geometric"]
Outside = Literal["clamp", "mask", "drop"]
BOUNDS: Mapping[str, tuple[float, float]] = {
    "token": (0.6, 1.8),
    "sequence": (0.6, 1.8),
    "geometric": (0.9, 1.2),
}


def sampled_batch() -> PackedBatch:
    """With log-probs of a sampler near the old policy's: ratios on both sides of BOUNDS."""
    batch = full_batch()
    draw = torch.Generator().manual_seed(8)
    drift = torch.randn(len(batch), generator=draw, dtype=F64) * 0.5
    return batch.with_fields(rollout_logprob=batch.fields["old_logprob"] + drift)


def transcribed(batch: PackedBatch, ratio: Ratio, outside: Outside) -> tuple[list[float], set[int]]:
    """Weights of counted tokens in order, and sequences with one outside."""
    weights, beyond, at = list[float](), set[int](), 0
    low, high = BOUNDS[ratio]
    for number, (n, mask) in enumerate(zip(LENGTHS, MASKS, strict=True)):
        where = [at + i - 1 for i, counts in enumerate(mask) if counts and i]
        ratios = [
            math.exp(float(batch.fields["old_logprob"][i] - batch.fields["rollout_logprob"][i]))
            for i in where
        ]
        if ratio == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        elif ratio == "geometric":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios) if ratios else []
        for r in ratios:
            fits = low <= r <= high
            beyond |= set() if fits else {number}
            weights.append(r if fits else min(max(r, low), high) if outside == "clamp" else 0.0)
        at += n
    return weights, beyond


@pytest.mark.parametrize(("ratio", "outside"), [*product(BOUNDS, ("clamp", "mask", "drop"))])
def test_value_and_gradient_equal_a_transcription(ratio: Ratio, outside: Outside) -> None:
    """Of the clipped term with a KL term that no weight touches; what is dropped is not counted, what is masked is."""
    batch = sampled_batch()
    found = importance_weights(batch, ratio=ratio, bounds=BOUNDS[ratio], outside=outside)
    weights, beyond = transcribed(batch, ratio, outside)
    assert_close(found.token[batch.mask], torch.tensor(weights, dtype=F64), SUM_ORDER)
    assert found.token.dtype == F64 and not found.token.requires_grad and 0 < len(beyond) < 3
    assert found.dropped == (beyond if outside == "drop" else set())
    stats = random_stats(len(weights))
    owners = batch.sequence_ids[batch.mask].tolist()
    columns = [
        counted(batch).fields[name].tolist()
        for name in ("old_logprob", "advantage", "reference_logprob")
    ]
    aggregations: tuple[Aggregation, ...] = ("token", "sequence")
    for aggregation in aggregations:
        kept = [i for i in range(batch.num_sequences) if i not in found.dropped]
        rest = batch.with_fields(rollout_weight=found.token).select(kept)
        rest = counted(rest.with_fields(**weight_fields(rest, aggregation)))
        mine = [i for i, owner in enumerate(owners) if owner in kept]
        used = TokenStats(stats.logprob[mine], stats.entropy[mine])
        result = PolicyLoss(kl_coef=0.3)(used, rest)
        (gradient,) = torch.autograd.grad(result.total / result.count, stats.logprob)
        sizes = {owner: owners.count(owner) for owner in owners}
        units = len(mine) if aggregation == "token" else len({owners[i] for i in mine})
        terms: list[float] = []
        slopes = [0.0] * len(weights)
        for i, (old, a, reference) in enumerate(zip(*columns, strict=True)):
            if i not in mine:
                continue
            p, share = (
                float(stats.logprob[i].detach()),
                1 / (units if aggregation == "token" else units * sizes[owners[i]]),
            )
            loss, d = clip_formula(p, old, a, 0.2, 0.2, None), p - reference
            terms += [share * weights[i] * loss, share * 0.3 * (math.exp(-d) - 1 + d)]
            moves = loss == -math.exp(p - old) * a
            slopes[i] = share * (weights[i] * (loss if moves else 0.0) + 0.3 * (1 - math.exp(-d)))
        parts = torch.tensor(terms, dtype=F64)
        assert_sum_close(result.total / result.count, parts.sum(), parts, SUM_ORDER)
        assert_close(gradient, torch.tensor(slopes, dtype=F64), SUM_ORDER)


@pytest.mark.parametrize("outside", ["clamp", "mask"])
def test_weights_of_the_update_itself_are_those_of_a_pass_before(outside: Any) -> None:
    """Value, gradient and means over tokens, of fresh and stale ones apart."""
    batch, stats = sampled_batch(), random_stats(10)
    scored = torch.zeros(len(batch), dtype=F64)
    scored[batch.mask] = stats.logprob.detach()
    lag = torch.arange(len(batch), dtype=F64) % 3
    batch = batch.with_fields(
        rollout_logprob=scored + torch.linspace(-1, 1, len(batch), dtype=F64), lag=lag
    )
    before = batch.with_fields(old_logprob=scored)
    weights = importance_weights(before, bounds=BOUNDS["token"], outside=outside)
    weighted = counted(before.with_fields(rollout_weight=weights.token))
    expected = PolicyLoss(kl_coef=0.3)(stats, weighted)
    # At the old policy's own log-probs every ratio is 1, so a token's term is its advantage.
    expected_terms = weighted.fields["rollout_weight"] * weighted.fields["advantage"]
    fields = {name: x for name, x in batch.fields.items() if name != "old_logprob"}
    found = PolicyLoss(kl_coef=0.3, sampler_bounds=BOUNDS["token"], outside=outside)(
        stats, counted(replace(batch, fields=fields))
    )
    for mine, theirs in zip(
        *(torch.autograd.grad(x.total, stats.logprob) for x in (found, expected)), strict=True
    ):
        assert_close(mine, theirs, SUM_ORDER)
    assert_sum_close(found.total, expected.total, expected_terms, SUM_ORDER)
    means = {name: float(total / count) for name, (total, count) in found.metrics.items()}
    apart = {
        name: x for name, x in mismatch(before, scored).items() if not name.endswith(("p99", "max"))
    }
    for name, value in {**weights.metrics, **apart}.items():
        if name != "correction_sample_size":
            assert means.pop(name) == pytest.approx(value), name
    assert not [name for name in means if "mismatch" in name or "correction" in name]


def test_shares_are_of_tokens_or_responses() -> None:
    """(sum w)^2 / (n sum w^2) of the weights as applied: 1 where all are alike."""
    batch = sampled_batch()
    for ratio, units in (("token", 10), ("sequence", 3)):
        level: Any = ratio
        metrics = importance_weights(
            batch, ratio=level, bounds=BOUNDS[level], outside="mask"
        ).metrics
        weights, beyond = transcribed(batch, level, "mask")
        if ratio == "sequence":
            weights = [weights[0], weights[2], weights[6]]
        share = sum(weights) ** 2 / (units * sum(w * w for w in weights))
        assert metrics["correction_sample_size"] == pytest.approx(share)
        assert metrics["correction_weight"] == pytest.approx(sum(weights) / units)
        assert metrics["correction_outside"] == pytest.approx(weights.count(0.0) / units)
        assert "correction_dropped" not in metrics and beyond
    same = batch.with_fields(rollout_logprob=batch.fields["old_logprob"])
    found = importance_weights(same, outside="drop")
    assert found.metrics == {
        "correction_dropped": 0.0, "correction_outside": 0.0, "correction_weight": 1.0, "correction_sample_size": 1.0,
    }  # fmt: skip
    far = batch.with_fields(rollout_logprob=torch.full((len(batch),), -1e4, dtype=F64))
    assert importance_weights(far, outside="mask").metrics["correction_sample_size"] == 0.0
    nothing = batch.with_mask(torch.zeros_like(batch.mask))
    found = importance_weights(nothing, ratio="geometric", outside="drop")
    assert not found.dropped and found.metrics == {"correction_dropped": 0.0}
    narrow = {name: x.to(torch.float32) for name, x in batch.fields.items()}
    assert importance_weights(replace(batch, fields=narrow)).token.dtype == torch.float32


def test_a_tokens_lag_is_the_update_minus_its_version() -> None:
    """Versions lie with the token that they predict, and tokens of older ones are compared apart."""
    spans = [((3, 0, 2), (5, 2, 3)), (), ((5, 0, 2),), ((1, 0, 4),), ((5, 0, 1), (4, 1, 2))]
    samples = [
        replace(s, completion=replace(s.completion, versions=versions))
        for s, versions in zip(SAMPLES, spans, strict=True)
    ]
    batch = pack_samples(samples, 1.0, version=5)
    assert batch.fields["lag"][batch.mask].tolist() == [2, 2, 0, 0, 0, 0, 4, 4, 4, 4, 0, 1]
    assert lag_metrics(batch) == {"lag_mean": pytest.approx(21 / 12), "lag_max": 4.0}
    stale = batch.fields["lag"] > 0
    scored = batch.fields["rollout_logprob"] - torch.where(stale, 0.5, 0.25)
    found, expected = mismatch(batch, scored, "replayed_"), dict[str, Any]()
    for age, distance in (("", 0.25), ("stale_", 0.5)):
        numbers = {
            "mean": distance,
            "p99": distance,
            "max": distance,
            "k3": math.exp(-distance) - 1 + distance,
        }
        expected |= {
            f"replayed_{age}mismatch_{name}": x for name, x in numbers.items()
        }  # k3 of KL(sampler || policy)
    assert found == {name: pytest.approx(x, rel=OP_FP32) for name, x in expected.items()}
    plain = pack_samples(SAMPLES, 1.0)
    assert "lag" not in plain.fields and lag_metrics(plain) == {}
    assert [*mismatch(plain, plain.fields["rollout_logprob"])] == [
        f"mismatch_{x}" for x in ("mean", "p99", "max", "k3")
    ]
    assert sample_row(samples[0])["versions"] == [
        [3, 0, 2],
        [5, 2, 3],
    ] and "versions" not in sample_row(SAMPLES[0])
    torn = replace(samples[0], completion=replace(samples[0].completion, versions=((4, 0, 2),)))
    assert pack_samples([torn, samples[2]], 1.0).fields["lag"].tolist() == [
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
    ], "the newest here is 5"
    for versions, newest in ((((5, 0, 4),), None), (((5, 0, 3),), 4)):
        torn = replace(torn, completion=replace(torn.completion, versions=versions))
        with pytest.raises(DataError, match=r"versions .* are not those of 3 tokens up to version"):
            pack_samples([torn], 1.0, newest)


def corrected_task(correction: Any, old: float = -1.25, **keys: Any) -> tuple[RLTask, Any]:
    """GRPO whose sampler's log-probs are -1 and the policy's `old`, and its policy."""
    task, _ = dynamic({0: [0.0, 1.0], 1: [1.0, 0.0]}, correction=correction, **keys)
    report = StepReport(1.0, 1.0, 0.1, 5, 1.0, skipped=False, metrics={})
    policy: Any = mock.Mock(
        score=mock.Mock(
            side_effect=lambda batch: TokenStats(
                torch.full((len(batch),), old), torch.zeros(len(batch))
            )
        ),
        train_step=mock.Mock(return_value=report),
    )
    task.policy = policy
    return task, policy


def test_a_step_weighs_masks_drops_or_believes_the_sampler() -> None:
    """Responses of 2 and of 9 tokens, each ratio e^-0.25."""
    task, policy = corrected_task(None)
    row = task.step(0)
    assert (
        row is not None
        and policy.score.call_count == 0
        and not [n for n in row if "mismatch" in n or "correct" in n]
    )
    trained = policy.train_step.call_args.args[0]
    assert "old_logprob" not in trained.fields and "rollout_weight" not in trained.fields

    task, policy = corrected_task({"ratio": "sequence", "bounds": [0.5, 2]})
    row, trained = task.step(0), policy.train_step.call_args.args[0]
    assert (
        row is not None
        and policy.score.call_count == 1
        and row["work"]["score"] == (len(trained), 4)
    )
    weights = [trained.fields["rollout_weight"][mine & trained.mask] for mine in own(trained)]
    for weight, expected in zip(weights, [math.exp(-0.5), 0.5, math.exp(-0.5), 0.5], strict=True):
        assert_close(weight, torch.full_like(weight, expected), OP_FP32)
    assert row["mismatch_mean"] == 0.25 and row["correction_outside"] == 0.5
    assert "correction_dropped" not in row

    task, policy = corrected_task({"ratio": "token", "bounds": [0.5, 2]})
    found = {"mismatch_mean": 0.25, "stale_mismatch_mean": math.nan, "correction_weight": 0.9}
    policy.train_step.return_value = StepReport(1.0, 1.0, 0.1, 5, 1.0, skipped=False, metrics=found)
    row, trained = task.step(0), policy.train_step.call_args.args[0]
    assert row is not None and policy.score.call_count == 0 and "score" not in row["work"], (
        "the update weighs its tokens"
    )
    assert "old_logprob" not in trained.fields and "rollout_weight" not in trained.fields
    assert (
        row["mismatch_mean"] == 0.25
        and row["correction_weight"] == 0.9
        and "stale_mismatch_mean" not in row
    )
    task, policy = corrected_task({"ratio": "token"}, epochs=2)
    assert task.step(0) is not None and policy.score.call_count == 1, (
        "of two updates the second has moved"
    )
    assert "rollout_weight" in policy.train_step.call_args.args[0].fields

    task, policy = corrected_task({"ratio": "sequence", "bounds": [0.5, 2], "outside": "drop"})
    row, trained = task.step(0), policy.train_step.call_args.args[0]
    assert (
        row is not None
        and row["correction_dropped"] == 0.5
        and row["tokens"] == len(trained) == 2 * 4
    )
    assert float(trained.fields["count"].sum()) == 4 and float(row["reward_mean"]) == 0.5
    assert sorted(trained.fields["advantage"][trained.mask].sign().tolist()) == [-1, -1, 1, 1], (
        "of the whole group"
    )

    task, policy = corrected_task({"ratio": "token", "bounds": [0.9, 1.1], "outside": "drop"})
    row = task.step(0)
    assert row is not None and policy.train_step.call_count == 0
    assert row["tokens"] == 0 and row["correction_dropped"] == 1.0

    task, policy = corrected_task({"old": "sampler"})
    row, trained = task.step(0), policy.train_step.call_args.args[0]
    assert row is not None and policy.score.call_count == 0 and "score" not in row["work"]
    assert torch.equal(trained.fields["old_logprob"], trained.fields["rollout_logprob"])
    assert "rollout_weight" not in trained.fields


def own(batch: PackedBatch) -> list[torch.Tensor]:
    return [batch.sequence_ids == i for i in range(batch.num_sequences)]


def test_the_critic_learns_from_what_the_policy_does() -> None:
    report = StepReport(1.0, 1.0, 0.1, 5, 1.0, skipped=False, metrics={})
    task = pretended_ppo(report, report, correction={"outside": "drop", "bounds": [1, 3]})
    row = task.step(0)
    assert row is not None and row["correction_dropped"] == 0.0 and row["mismatch_mean"] == 1.0
    critic: Any = task.critic
    assert critic.train_step.call_count == 4


def test_the_default_is_of_the_backend() -> None:
    """`vllm` stands for any sampler out of process."""

    def remote(recipe: Recipe, **keys: Any) -> Recipe:
        return recipe.model_copy(
            update={"rollout": recipe.rollout.model_copy(update={"backend": "vllm", **keys})}
        )

    assert recipe_of().correction is recipe_of("sft").correction is None
    assert remote(recipe_of()).correction == CorrectionSection(
        ratio="token", bounds=(0.0, 2.0), outside="clamp"
    )
    assert remote(recipe_of(correction={"ratio": "none"})).correction is None
    believed = CorrectionSection(ratio="none", old="sampler")
    assert recipe_of(correction={"ratio": "none", "old": "sampler"}).correction == believed
    with pytest.raises(
        ValueError,
        match=r"rollout.backend=vllm samples from the distribution as changed by rollout.top_p=0.9",
    ):
        check_correction(CorrectionSection(), remote(recipe_of(), top_p=0.9).rollout)
    for given, message in (
        (
            {"bounds": [2, 3]},
            r"algorithm.correction: bounds is \[2, 3\]; expected a range around 1",
        ),
        ({"bounds": [0.5]}, r"algorithm.correction.bounds is .*; expected 2 values"),
        (
            {"old": "sampler", "ratio": "sequence"},
            "algorithm.correction: with old: sampler .*; leave out ratio, or set old",
        ),
        (
            {"outside": "drp"},
            "algorithm.correction.outside is 'drp'; expected 'clamp', 'mask' or 'drop'",
        ),
        (
            {"ration": "token"},
            "unknown key algorithm.correction.ration; did you mean algorithm.correction.ratio",
        ),
        ("none", "algorithm.correction is 'none'; expected a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe_of(correction=given)
    nested = recipe_of(correction={"old": "sampler"}).model_dump(by_alias=True, mode="json")
    assert make_recipe(nested).correction == CorrectionSection(old="sampler"), (
        "a run resumes from all its keys"
    )
    with pytest.raises(
        ConfigError, match=r"correction.old is sampler, but rollout.router_replay=trainer takes"
    ):
        make_recipe(
            {
                **nested,
                "algorithm": {"correction": {"old": "sampler"}},
                "rollout": {"router_replay": "trainer"},
            }
        )
