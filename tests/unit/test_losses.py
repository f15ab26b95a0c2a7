"""Losses against formulas written out token by token, their gradients against autograd and exact expectations."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError
from dovetail.nn.heads import is_separable
from dovetail.rl.algorithms.ppo import ValueLoss
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.rl.losses import Aggregation, KLEstimator, PolicyLoss, kl_estimate
from tests.helpers.loss_batches import F64, clip_formula, counted, full_batch, random_stats
from tests.helpers.tolerances import EXACT, GRADCHECK, SUM_ORDER, assert_close, assert_sum_close


def pieces(
    stats: TokenStats, batch: PackedBatch, size: int
) -> list[tuple[TokenStats, PackedBatch]]:
    spans = torch.arange(len(batch)).split(size)
    return [(TokenStats(stats.logprob[i], stats.entropy[i]), batch.compact(i)) for i in spans]


@pytest.mark.parametrize("dual", [None, 1.3])
def test_the_policy_loss_is_the_clipped_objective_token_by_token(dual: float | None) -> None:
    batch = counted(full_batch())
    stats = random_stats(len(batch))
    loss = PolicyLoss(clip_low=0.2, clip_high=0.3, dual_clip=dual)(stats, batch)
    columns = (stats.logprob, batch.fields["old_logprob"], batch.fields["advantage"])
    values = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [clip_formula(p, old, a, 0.2, 0.3, dual) for p, old, a in values]
    terms = torch.tensor(expected, dtype=F64)
    assert_sum_close(loss.total, terms.sum(), terms, SUM_ORDER)
    assert float(loss.count) == len(batch) == 10
    log_ratio = stats.logprob.detach() - batch.fields["old_logprob"]
    sums = {
        "clip_fraction": sum(
            clip_formula(p, o, a, 0.2, 0.3, None) > -a * math.exp(p - o) for p, o, a in values
        ),
        "approx_kl": (
            log_ratio.exp() - 1 - log_ratio
        ).sum(),  # of KL(old || new), from the old policy's tokens
        "ratio_mean": log_ratio.exp().sum(),
        "ratio_deviation": (log_ratio.exp() - 1).abs().sum(),
        "entropy_mean": stats.entropy.detach().sum(),
    }
    ratio = log_ratio.exp()
    for name, value in sums.items():
        found, wanted = (torch.as_tensor(x).to(F64) for x in (loss.metrics[name].total, value))
        if name == "approx_kl":
            assert_sum_close(found, wanted, torch.cat([ratio, ratio * 0 + 1, log_ratio]), SUM_ORDER)
        elif name == "ratio_deviation":
            assert_sum_close(found, wanted, torch.cat([ratio, ratio * 0 + 1]), SUM_ORDER)
        else:
            assert_close(found, wanted, SUM_ORDER, name)
        assert float(loss.metrics[name].count) == 10
    if dual is not None:
        assert float(loss.metrics["dual_clip_fraction"].total) > 0


def test_at_ratio_one_the_gradient_is_minus_the_advantage() -> None:
    """Catches the advantage's sign, a stale old log-prob and a shifted field at once."""
    batch = counted(full_batch())
    logprob = batch.fields["old_logprob"].clone().requires_grad_()
    loss = PolicyLoss()(TokenStats(logprob, torch.zeros_like(logprob)), batch)
    (gradient,) = torch.autograd.grad(loss.total, logprob)
    assert_close(gradient, -batch.fields["advantage"], SUM_ORDER)
    assert (
        float(loss.metrics["clip_fraction"].total)
        == float(loss.metrics["approx_kl"].total)
        == EXACT
    )
    assert float(loss.metrics["ratio_mean"].total) == float(loss.metrics["ratio_mean"].count)
    absent = replace(batch, fields={"advantage": batch.fields["advantage"]})
    same = PolicyLoss()(TokenStats(logprob, torch.zeros_like(logprob)), absent)
    assert torch.equal(torch.autograd.grad(same.total, logprob)[0], gradient), (
        "no old log-probs: the policy's own"
    )
    wrong = {
        "sign": batch.with_fields(advantage=-batch.fields["advantage"]),
        "stale": batch.with_fields(old_logprob=batch.fields["old_logprob"] - 0.5),
        "shift": batch.with_fields(advantage=batch.fields["advantage"].roll(1)),
    }
    for name, mutant in wrong.items():
        mutated = PolicyLoss()(TokenStats(logprob, torch.zeros_like(logprob)), mutant)
        (other,) = torch.autograd.grad(mutated.total, logprob)
        assert not torch.allclose(other, gradient), f"{name} went unnoticed"


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.5, 1.0, False), (0.5, 1.0, True), (1.5, -1.0, True), (0.5, -1.0, False)],
)
def test_clipping_stops_only_the_gradient_that_leads_further_away(
    ratio: float, advantage: float, moves: bool
) -> None:
    batch = PackedBatch.pack([[1, 1]]).with_fields(
        old_logprob=torch.zeros(2), advantage=torch.tensor([advantage, advantage])
    )
    logprob = torch.full((1,), math.log(ratio), requires_grad=True)
    loss = PolicyLoss()(TokenStats(logprob, torch.zeros(1)), batch.compact(torch.tensor([0])))
    (gradient,) = torch.autograd.grad(loss.total, logprob)
    assert bool(gradient != 0) == moves
    assert float(loss.metrics["clip_fraction"].total) == float(not moves)


def test_kl_and_entropy_terms_add_up() -> None:
    batch = counted(full_batch("sequence"))
    stats = random_stats(len(batch))
    plain = PolicyLoss()(stats, batch).total
    both = PolicyLoss(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.1)(stats, batch)
    weight, reference = batch.fields["weight"], batch.fields["reference_logprob"]
    kl = (stats.logprob - reference) ** 2 / 2
    penalty = 0.3 * weight * kl
    bonus = -0.1 * weight * stats.entropy
    terms = torch.cat([plain[None], penalty, bonus])
    assert_sum_close(both.total, plain + (penalty + bonus).sum(), terms, SUM_ORDER)
    assert_close(both.metrics["kl_mean"].total, kl.sum(), SUM_ORDER)
    gradient = torch.autograd.grad(both.total, stats.entropy)[0]
    assert_close(gradient, -0.1 * weight, SUM_ORDER)


def test_the_wanted_pull_of_the_kl_is_towards_the_reference() -> None:
    """The sign: descending on k2 or k3 raises a log-prob that lies below the reference's."""
    kinds: tuple[KLEstimator, ...] = ("k2", "k3")
    for kind in kinds:
        logprob = torch.tensor([-3.0, -1.0], dtype=F64, requires_grad=True)
        (gradient,) = torch.autograd.grad(
            kl_estimate(logprob, torch.full((2,), -2.0), kind).sum(), logprob
        )
        assert gradient[0] < 0 < gradient[1]


def test_kl_estimators_have_the_expected_values_and_gradients() -> None:
    """Exactly, over a vocabulary of 6: k1 and k3 are unbiased; k2's gradient is that of KL(p||q), k3's of KL(q||p)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=F64, requires_grad=True)
    q = torch.randn(6, generator=generator, dtype=F64).log_softmax(0)
    p = logits.log_softmax(0)
    weight = p.detach().exp()  # the expectation over sampled tokens: sampling has no gradient
    terms = p.exp() * (p - q)
    forward = terms.sum()
    backward = (q.exp() * (q - p)).sum()

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    for kind in ("k1", "k3"):
        assert_sum_close((weight * kl_estimate(p, q, kind)).sum(), forward, terms, SUM_ORDER)
    assert float(kl_estimate(p, q, "k3").detach().min()) >= 0
    assert_close(gradient((weight * kl_estimate(p, q, "k2")).sum()), gradient(forward), SUM_ORDER)
    assert_close(gradient((weight * kl_estimate(p, q, "k3")).sum()), gradient(backward), SUM_ORDER)
    assert float(gradient((weight * kl_estimate(p, q, "k1")).sum()).abs().max()) < SUM_ORDER
    in_reward = gradient(
        (p.exp() * kl_estimate(p, q, "k1").detach()).sum()
    )  # that of a policy whose reward it lowers
    assert_close(in_reward, gradient(forward), SUM_ORDER)


LOSSES: dict[str, LossFn] = {
    "sft": SFTLoss(),
    "policy": PolicyLoss(clip_high=0.28, dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01),
    "gspo": PolicyLoss(ratio="sequence", clip_low=0.3, clip_high=0.4, kl_coef=0.1),
}
AGGREGATIONS: list[Aggregation | None] = [None, "token", "sequence", "sequence_sum"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["sft", "policy", "value"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_separable_losses_add_up_over_any_pieces(
    name: str, aggregation: Aggregation | None, size: int
) -> None:
    batch = counted(full_batch(aggregation, 8.0))
    stats = random_stats(len(batch))
    fn: Callable[[Any, PackedBatch], Loss] = (
        LOSSES[name] if name != "value" else lambda s, b: ValueLoss()(s.logprob, b)
    )
    whole = fn(stats, batch)
    parts = [fn(s, b) for s, b in pieces(stats, batch, size)]
    totals = torch.stack([part.total for part in parts])
    total = totals.sum()
    assert_sum_close(total, whole.total, totals, SUM_ORDER)
    assert sum(float(part.count) for part in parts) == float(whole.count)
    assert_close(
        torch.autograd.grad(total, stats.logprob)[0],
        torch.autograd.grad(whole.total, stats.logprob)[0],
        SUM_ORDER,
    )
    for metric, value in whole.metrics.items():
        assert sum(float(part.metrics[metric].count) for part in parts) == float(value.count)
        sums = torch.stack([part.metrics[metric].total for part in parts])
        assert_sum_close(sums.sum(), value.total, sums, SUM_ORDER)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum"])
def test_aggregations_are_the_means_that_they_name(aggregation: Aggregation) -> None:
    batch = full_batch(aggregation, constant=8.0)
    values = torch.randn(len(batch), generator=torch.Generator().manual_seed(9), dtype=F64)
    per_sequence = [
        values[(batch.sequence_ids == s) & batch.mask] for s in range(batch.num_sequences)
    ]
    filled = [x for x in per_sequence if len(x)]
    assert len(filled) == 3, "sequences without counted tokens must not count"
    expected = {
        "token": torch.cat(filled).mean(),
        "sequence": torch.stack([x.mean() for x in filled]).mean(),
        "sequence_sum": torch.stack([x.sum() / 8.0 for x in filled]).mean(),
    }
    compact = counted(batch)
    loss = SFTLoss()(TokenStats(-values[batch.mask], torch.zeros(len(compact))), compact)
    assert float(loss.count) == (len(compact) if aggregation == "token" else len(filled))
    terms = torch.cat(filled) / loss.count
    assert_sum_close(loss.total / loss.count, expected[aggregation], terms, SUM_ORDER)


def test_gspo_is_the_clip_of_the_mean_ratio_once_a_sequence() -> None:
    batch = counted(full_batch("sequence"))
    advantage = torch.tensor([0.7, -1.2, 0.0, 0.4, 0.0], dtype=F64)[batch.sequence_ids]
    batch = batch.with_fields(advantage=advantage)
    stats = random_stats(len(batch))
    fn = PolicyLoss(ratio="sequence", clip_low=0.1, clip_high=0.15)
    loss = fn(stats, batch)
    terms = []
    for sequence in (0, 1, 3):
        mine = batch.sequence_ids == sequence
        ratio = (stats.logprob - batch.fields["old_logprob"])[mine].mean().exp()
        a = advantage[mine][0]
        terms.append(-torch.minimum(ratio * a, ratio.clamp(0.9, 1.15) * a))
    expected = torch.stack(terms).sum()
    assert float(loss.count) == 3
    assert_sum_close(loss.total, expected, terms, SUM_ORDER)
    actual, wanted = (torch.autograd.grad(x, stats.logprob)[0] for x in (loss.total, expected))
    assert_close(actual, wanted, SUM_ORDER)
    pieced = sum(float(fn(s, b).total.detach()) for s, b in pieces(stats, batch, 2))
    assert abs(pieced - float(expected.detach())) > 1e-3, (
        "pieces of sequences give another ratio, so it is not separable"
    )


def test_separable_says_what_may_be_cut() -> None:
    assert is_separable(SFTLoss()) and is_separable(PolicyLoss()) and is_separable(ValueLoss())
    assert not is_separable(PolicyLoss(ratio="sequence"))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss(clip: float | None) -> None:
    batch = counted(full_batch())
    values = random_stats(len(batch)).logprob + 2
    loss = ValueLoss(clip)(values, batch)
    total, clipped = 0.0, 0
    columns = zip(
        values.tolist(),
        batch.fields["return"].tolist(),
        batch.fields["old_value"].tolist(),
        strict=True,
    )
    for v, target, old in columns:
        error = (v - target) ** 2
        near = (max(old - 0.2, min(v, old + 0.2)) - target) ** 2 if clip else error
        clipped += near > error
        total += max(error, near) / 2
    assert_close(loss.total, torch.tensor(total, dtype=F64), SUM_ORDER)
    assert_close(ValueLoss(clip, coef=0.5)(values, batch).total, loss.total / 2, SUM_ORDER)
    if clip:
        assert 0 < clipped == float(loss.metrics["value_clip_fraction"].total)


def test_values_that_moved_little_are_not_clipped() -> None:
    """A fresh head's: smaller than what they moved by, so that float32 does not give them back from the old ones."""
    draw = torch.Generator().manual_seed(0)
    ids = [1] * 1001
    old, values, goal = (0.03 * torch.randn(len(ids), generator=draw) for _ in range(3))
    batch = PackedBatch.pack([ids]).with_fields(old_value=old, **{"return": goal})
    loss = ValueLoss(0.2)(values, batch)
    assert float(loss.metrics["value_clip_fraction"].total) == 0
    assert torch.equal(loss.total, ValueLoss(None)(values, batch).total)


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_equal_finite_differences(name: str) -> None:
    batch = counted(full_batch("sequence"))
    stats = random_stats(len(batch))
    fn = LOSSES[name]
    assert torch.autograd.gradcheck(
        lambda p, h: fn(TokenStats(p, h), batch).total,
        (stats.logprob, stats.entropy),
        atol=GRADCHECK,
    )


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_tokens_are_a_differentiable_zero(name: str) -> None:
    batch = counted(full_batch("sequence")).compact(torch.empty(0, dtype=torch.int64))
    stats = random_stats(0)
    loss = LOSSES[name](stats, batch)
    assert float(loss.total.detach()) == float(loss.count) == EXACT
    assert loss.total.requires_grad
    assert all(float(m.total) == float(m.count) == EXACT for m in loss.metrics.values())


def test_extreme_ratios_stay_finite() -> None:
    batch = PackedBatch.pack([[1, 1, 1]]).with_fields(
        old_logprob=torch.tensor([-500.0, 0.0, 0.0]),
        reference_logprob=torch.tensor([0.0, -500.0, 0.0]),
        advantage=torch.tensor([-1.0, 1.0, 0.0]),
    )
    logprob = torch.tensor([0.0, -500.0], requires_grad=True)
    stats = TokenStats(logprob, torch.zeros(2))
    loss = PolicyLoss(kl_coef=1.0)(stats, batch.compact(torch.tensor([0, 1])))
    assert bool(loss.total.isfinite()) and bool(
        torch.autograd.grad(loss.total, logprob)[0].isfinite().all()
    )


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    batch = replace(counted(full_batch()), fields={})
    stats = TokenStats(
        torch.full((len(batch),), -1.0, dtype=torch.bfloat16), torch.zeros(len(batch))
    )
    assert SFTLoss()(stats, batch).total.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 0.9}, "must be above 1"),
    ],
)
def test_impossible_clips_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PolicyLoss(**options)  # type: ignore[arg-type]


def test_a_kl_term_without_a_reference_is_refused() -> None:
    batch = counted(full_batch())
    bare = replace(
        batch, fields={k: v for k, v in batch.fields.items() if k != "reference_logprob"}
    )
    assert "kl_mean" not in PolicyLoss()(random_stats(len(bare)), bare).metrics
    with pytest.raises(ConfigError, match="reference_logprob"):
        PolicyLoss(kl_coef=0.1)(random_stats(len(bare)), bare)
