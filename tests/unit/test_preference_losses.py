"""Preference losses: values and gradients of TRL's code and of formulas written out, and what is refused."""

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import ConfigError, DataError
from dovetail.nn.heads import is_separable
from dovetail.rl.algorithms.cpo import CPOLoss
from dovetail.rl.algorithms.dpo import DPOLoss
from dovetail.rl.algorithms.kto import KTOLoss
from dovetail.rl.algorithms.orpo import ORPOLoss, _log1mexp
from dovetail.rl.algorithms.pairs import nll_fields
from dovetail.rl.algorithms.reward_model import RewardLoss, last_tokens
from tests.helpers.loss_batches import counted
from tests.helpers.of_trl import of_trl
from tests.helpers.preference_numbers import (
    CHOSEN,
    KL,
    LABELS,
    PROMPTS,
    REJECTED,
    TRL_PREFERENCES,
    random_logits,
)
from tests.helpers.tolerances import OP_FP32, SUM_ORDER, assert_close, assert_sum_close

F64 = torch.float64
PAIRS = [row for pair in zip(CHOSEN, REJECTED, strict=True) for row in pair]
ORDER = [
    number for pair in range(len(CHOSEN)) for number in (pair, pair + len(CHOSEN))
]  # of PAIRS in TRL's batch


def pair_rows(*, whole_chosen: bool = False) -> list[Sequence]:
    """whole_chosen: prompts of the chosen are counted, too, with the field `completion` 0."""
    rows = []
    for i, ids in enumerate(PAIRS):
        n, chosen = PROMPTS[i // 2], i % 2 == 0
        own = [0.0] * n + [1.0] * (len(ids) - n)
        mask = [True] * len(ids) if whole_chosen and chosen else [x > 0 for x in own]
        rows.append(Sequence(ids, mask, {"completion": own} if whole_chosen else {}, group=i // 2))
    return rows


def token_logprobs(logits: Tensor, batch: PackedBatch) -> Tensor:
    """[T] of a batch of PAIRS."""
    table = torch.cat(
        [logits[i, : len(ids)] for i, ids in zip(ORDER, PAIRS, strict=True)]
    ).log_softmax(-1)
    return table.gather(-1, batch.targets[:, None])[:, 0]


def our_loss(kind: str, settings: Mapping[str, Any], logits: Tensor) -> Loss:
    keys = dict(settings)
    batch = PackedBatch.pack(pair_rows(whole_chosen=kind == "orpo"), dtype=F64)
    batch = batch.with_fields(reference_logprob=token_logprobs(random_logits(4), batch))
    if kind == "reward":
        values = torch.cat(
            [logits[i, 0, :1].expand(len(ids)) for i, ids in zip(ORDER, PAIRS, strict=True)]
        )
        batch = batch.with_mask(last_tokens(batch))
        return RewardLoss(**keys)(values[batch.mask], counted(batch))
    if kind == "kto":
        labels = torch.tensor([float(LABELS[i]) for i in ORDER], dtype=F64)
        batch = batch.with_fields(
            label=labels[batch.sequence_ids], kl=torch.full((len(batch),), KL, dtype=F64)
        )
    if kind in ("cpo", "orpo"):
        batch = batch.with_fields(**nll_fields(batch, keys.pop("alpha", 1.0)))
    stats = TokenStats(
        token_logprobs(logits, batch)[batch.mask], torch.zeros(int(batch.mask.sum()), dtype=F64)
    )
    loss = {"dpo": DPOLoss, "cpo": CPOLoss, "orpo": ORPOLoss, "kto": KTOLoss}[kind](**keys)
    assert not is_separable(loss)
    result: Loss = loss(stats, counted(batch))
    return result


@pytest.fixture(scope="module")
def trl() -> Mapping[str, Any]:
    return of_trl("trl_preferences")


@pytest.mark.parametrize("name", TRL_PREFERENCES)
def test_values_and_gradients_are_those_of_trl(name: str, trl: Mapping[str, Any]) -> None:
    kind, _, settings = TRL_PREFERENCES[name]
    logits = random_logits().requires_grad_()
    result = our_loss(kind, settings, logits)
    loss = result.total / result.count
    (gradient,) = torch.autograd.grad(loss, logits)
    limit = OP_FP32 if kind == "orpo" else SUM_ORDER  # TRL's odds are float32
    assert_close(loss, torch.tensor(trl[name]["loss"], dtype=F64), limit)
    assert_close(gradient, torch.tensor(trl[name]["gradient"], dtype=F64).view_as(gradient), limit)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_transcriptions_by_pair() -> None:
    """DPO with label smoothing (cDPO) and ORPO in float64, and the metrics of pairs."""
    logits = random_logits()
    batch = PackedBatch.pack(pair_rows(), dtype=F64)
    reference = token_logprobs(random_logits(4), batch)
    sums, means, ratios = [], [], []
    for own, ref, mask in zip(
        *(x.split(batch.lengths) for x in (token_logprobs(logits, batch), reference, batch.mask)),
        strict=True,
    ):
        sums.append(float(own[mask].sum()))
        means.append(float(own[mask].mean()))
        ratios.append(float((own - ref)[mask].sum()))
    rewards = 0.1 * torch.tensor(ratios, dtype=F64)  # beta 0.3 over 3 pairs
    margins = [0.3 * (a - b) for a, b in zip(ratios[::2], ratios[1::2], strict=True)]
    result = our_loss("dpo", {"beta": 0.3, "label_smoothing": 0.2}, logits)
    expected = sum(-0.8 * log_sigmoid(m) - 0.2 * log_sigmoid(-m) for m in margins)
    assert_close(result.total, torch.tensor(expected, dtype=F64), SUM_ORDER)
    metrics = {name: s.total / s.count for name, s in result.metrics.items()}
    chosen, rejected = rewards[::2], rewards[1::2]
    assert_sum_close(metrics["rewards/margins"], (chosen - rejected).sum(), rewards, SUM_ORDER)
    assert_sum_close(metrics["rewards/chosen"], chosen.sum(), chosen, SUM_ORDER)
    assert float(metrics["rewards/accuracies"]) == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert float(metrics["logps/rejected"]) == pytest.approx(sum(sums[1::2]) / 3, rel=SUM_ORDER)

    odds = [math.log(math.exp(x) / (1 - math.exp(x))) for x in means]
    ratio = sum(log_sigmoid(a - b) for a, b in zip(odds[::2], odds[1::2], strict=True))
    result = our_loss("orpo", {"beta": 0.3}, logits)
    nll, tokens = result.metrics["nll_loss"]
    assert float(tokens) == sum(len(ids) - 1 for ids in CHOSEN)  # prompts, too
    terms = (3 * nll / tokens, torch.tensor(-0.3 * ratio, dtype=F64))
    assert_sum_close(result.total, terms[0] + terms[1], terms, SUM_ORDER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log1mexp_loses_no_digit_near_either_end(dtype: torch.dtype) -> None:
    """Against 50 decimal digits; 1 - e^x has none left for a small x, nor log of what is near 1."""
    tolerance = OP_FP32 if dtype == torch.float32 else SUM_ORDER
    points = [-50.0, -30.0, -5.0, -0.7, -0.69, -0.1, -1e-3, -1e-6, -1e-12]
    x = torch.tensor(points, dtype=dtype)
    with localcontext() as context:
        context.prec = 50
        given = [Decimal(value) for value in x.double().tolist()]
        expected = [float((1 - value.exp()).ln()) for value in given]
    for number, value in enumerate(expected):
        found = _log1mexp(x[number : number + 1]).double()
        assert_close(found, torch.tensor([value], dtype=F64), tolerance, f"x = {points[number]}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log1mexp_is_finite_up_to_0_with_its_gradient(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [0.0, -1e-300, -1e-30, -1e-9, -0.5, -1.0, -200.0], dtype=dtype, requires_grad=True
    )
    found = _log1mexp(x)
    assert torch.isfinite(found).all()
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.isfinite(gradient).all() and gradient[0] == 0
    assert_close(gradient[3:4], torch.tensor([-1e9], dtype=dtype), OP_FP32, "-1 / (e^-x - 1)")


@pytest.mark.parametrize("empty", [0, 1], ids=["chosen", "rejected"])
def test_orpo_of_a_completion_without_a_counted_token_is_finite(empty: int) -> None:
    """Of the first pair; its tokens of the other completion keep their gradient."""
    rows = pair_rows()
    rows[empty] = replace(rows[empty], mask=[False] * len(rows[empty].ids))
    batch = PackedBatch.pack(rows, dtype=F64)
    batch = batch.with_fields(**nll_fields(batch, 1.0))
    logits = random_logits().requires_grad_()
    logprob = token_logprobs(logits, batch)[batch.mask]
    result = ORPOLoss()(TokenStats(logprob, torch.zeros_like(logprob)), counted(batch))
    (gradient,) = torch.autograd.grad(result.total, logits)
    assert torch.isfinite(result.total)
    assert all(torch.isfinite(metric.total) for metric in result.metrics.values())
    assert torch.isfinite(gradient).all() and gradient.any()


def test_padding_and_empty_micro_batches() -> None:
    """A padded batch loses nothing, and one without pairs adds nothing."""
    batch = PackedBatch.pack(pair_rows(), dtype=F64)
    batch = batch.with_fields(reference_logprob=token_logprobs(random_logits(4), batch))
    logprob = token_logprobs(random_logits(), batch)[batch.mask]
    stats = TokenStats(logprob, torch.zeros_like(logprob))
    expected, padded = (
        DPOLoss()(stats, counted(batch)),
        DPOLoss()(stats, counted(batch.pad_to_multiple(32))),
    )
    assert (float(expected.total), float(expected.count)) == (
        float(padded.total),
        float(padded.count),
    )
    marks = {name: torch.ones(len(batch), dtype=F64) for name in ("label", "kl")}
    of_one, of_padded = (
        KTOLoss()(stats, counted(b))
        for b in (batch.with_fields(**marks), batch.with_fields(**marks).pad_to_multiple(32))
    )
    assert (float(of_one.total), float(of_one.count)) == (float(of_padded.total), 6.0)
    nothing = PackedBatch.pack([Sequence([1])], dtype=F64).with_fields(
        reference_logprob=torch.zeros(1, dtype=F64)
    )
    empty = DPOLoss()(TokenStats(logprob[:0], logprob[:0]), counted(nothing))
    assert (float(empty.total), float(empty.count)) == (0.0, 0.0)


def test_mistakes() -> None:
    rows = pair_rows()
    batch = PackedBatch.pack(rows)
    stats = TokenStats(torch.zeros(int(batch.mask.sum())), torch.zeros(int(batch.mask.sum())))
    with pytest.raises(ConfigError, match=r"needs the field reference_logprob: batch\.with_fields"):
        DPOLoss()(stats, counted(batch))
    torn = PackedBatch.pack(rows[:-1])
    with pytest.raises(
        DataError, match=r"group 2 has 1 sequences; a pair has two: dt.Sequence\(chosen, group=2\)"
    ):
        CPOLoss()(stats, counted(torn))
    with pytest.raises(ConfigError, match=r"label_smoothing=0.1 has no meaning for the loss ipo"):
        DPOLoss(kind="ipo", label_smoothing=0.1)
    with pytest.raises(ConfigError, match=r"label_smoothing=0.5 is a share of wrong labels"):
        DPOLoss(label_smoothing=0.5)
