"""Distillation in the fused head: equal to autograd through whole logits, and to TRL, for any chunk, divergence and top k."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.batch.loss import Loss
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.divergence import Divergence, Kind
from dovetail.kernels.registry import KernelSet
from dovetail.nn.distillation import ROW, DistillStats, TeacherStates
from dovetail.nn.heads import VocabShard
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from dovetail.rl.algorithms.distillation import DistillationLoss, SampledReverseKL
from tests.helpers.distillation_numbers import GKD_CASES, gkd_labels, gkd_logits
from tests.helpers.divergence_terms import terms_of
from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import OP_BF16, OP_FP32, SUM_ORDER, assert_close, assert_sum_close

WIDTH, TEACHER_WIDTH, VOCAB = 6, 4, 17
KINDS: list[tuple[Kind, float]] = [
    ("forward_kl", 0.5),
    ("reverse_kl", 0.5),
    ("jsd", 0.5),
    ("jsd", 0.1),
    ("jsd", 0.0),
]


class Mixed(DistillationLoss):
    """With terms in log-prob and entropy, whose gradients the head adds, and a divergence that is not linear."""

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss:
        assert isinstance(stats, DistillStats)
        weight = batch.fields["weight"]
        rest = (weight * stats.logprob.exp() - 0.3 * stats.entropy.square()).sum()
        return Loss(
            rest + (weight * (stats.divergence + stats.divergence.square())).sum(), batch.mask.sum()
        )


def made(
    chunk: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, VocabShard, PackedBatch, TeacherStates]:
    draw = torch.Generator().manual_seed(0)
    batch = PackedBatch.pack(
        [torch.randint(VOCAB, (n,), generator=draw) for n in (5, 1, 9, 3)], dtype=torch.float64
    )
    batch = batch.with_fields(
        weight=torch.randn(len(batch), generator=draw, dtype=torch.float64),
        temperature=torch.linspace(0.5, 2.0, len(batch), dtype=torch.float64),
        **{ROW: torch.randperm(len(batch), generator=draw)},
    )
    counted = batch.compact(batch.mask.nonzero()[:, 0])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    x, weight = normal(len(counted), WIDTH).requires_grad_(), normal(VOCAB, WIDTH).requires_grad_()
    teacher = TeacherStates(normal(len(batch), TEACHER_WIDTH), normal(VOCAB, TEACHER_WIDTH), VOCAB)
    shard = VocabShard(weight, 0, Axis("tp"), Products(KernelSet(head_chunk=chunk)))
    return x, shard, counted, teacher


def whole(x: Tensor, weight: Tensor, batch: PackedBatch, loss: DistillationLoss) -> Loss:
    """From logits of both that exist, by autograd alone."""
    heat = batch.fields["temperature"].to(x.dtype)[:, None]
    teacher = loss.teacher
    a = (x @ weight.T / heat).log_softmax(-1)
    b = (teacher.hidden[batch.fields[ROW]] @ teacher.weight.T / heat).log_softmax(-1)
    logprob = a.gather(1, batch.targets[:, None])[:, 0]
    entropy = -(a.exp() * a).sum(-1)
    theirs = b.gather(1, batch.targets[:, None])[:, 0], -(b.exp() * b).sum(-1)
    if loss.top_k:
        ids = b.topk(loss.top_k).indices
        a, b = (closed(v.gather(1, ids), loss.tail) for v in (a, b))
    p, q, beta = a.exp(), b.exp(), loss.beta
    kind = (
        loss.divergence
        if loss.divergence != "jsd" or beta not in (0, 1)
        else ("forward_kl", "reverse_kl")[int(beta)]
    )
    if kind == "forward_kl":
        divergence = (q * (b - a)).sum(-1)
    elif kind == "reverse_kl":
        divergence = (p * (a - b)).sum(-1)
    else:
        m = (beta * q + (1 - beta) * p).log()
        divergence = beta * (q * (b - m)).sum(-1) + (1 - beta) * (p * (a - m)).sum(-1)
    return loss(DistillStats(logprob, entropy, divergence, *theirs), batch)


def closed(logprob: Tensor, tail: bool) -> Tensor:
    total = logprob.exp().sum(-1, keepdim=True)
    return torch.cat([logprob, (1 - total).log()], -1) if tail else logprob - total.log()


@pytest.mark.parametrize(
    "top", [(0, True), (3, True), (3, False), (1, True)], ids=["all", "tail", "renormalized", "one"]
)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_equals_autograd_through_whole_logits(
    kind: Kind, beta: float, top: tuple[int, bool]
) -> None:
    """Of the mean divergence with its metrics, and of a loss that mixes all statistics; an upstream factor reaches both."""
    for chunk, make in ((1, DistillationLoss), (4, Mixed), (64, Mixed)):
        x, shard, batch, teacher = made(chunk)
        loss = make(teacher=teacher, divergence=kind, beta=beta, top_k=top[0], tail=top[1])
        expected, found = whole(x, shard.weight, batch, loss), loss.in_head(x, shard, batch, loss)
        tokens = [torch.tensor([i]) for i in range(len(batch))]
        alone = [whole(x[i], shard.weight, batch.compact(i), loss) for i in tokens]
        assert_sum_close(found.total, expected.total, [each.total for each in alone], SUM_ORDER)
        assert found.metrics.keys() == expected.metrics.keys()
        for name, (total, count) in expected.metrics.items():
            terms = [each.metrics[name].total for each in alone]
            assert_sum_close(found.metrics[name].total, total, terms, SUM_ORDER, name)
            assert int(found.metrics[name].count) == int(count) == len(batch)
        want = torch.autograd.grad(3.0 * expected.total, (x, shard.weight))
        for a, b in zip(
            torch.autograd.grad(3.0 * found.total, (x, shard.weight)), want, strict=True
        ):
            assert_close(a, b, SUM_ORDER)


@pytest.fixture(scope="module")
def trl() -> dict[str, Any]:
    """Of the installed TRL, or as written."""
    if importlib.util.find_spec("trl") is None:
        written: dict[str, Any] = json.loads(
            (Path(__file__).parents[1] / "helpers" / "trl_distillation.json").read_text()
        )
        return written
    found: dict[str, Any] = json.loads(
        output_of(template, "tests.helpers.distillation_numbers").splitlines()[-1]
    )
    return found


@pytest.mark.parametrize("name", GKD_CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients_are_those_of_trl(
    name: str, dtype: torch.dtype, trl: dict[str, Any]
) -> None:
    """Logits as the head's rows times an identity, so that gradients of hidden states are those of logits."""
    keys: dict[str, Any] = dict(GKD_CASES[name])
    labels = gkd_labels().flatten()
    student, teachers = gkd_logits(1).flatten(0, 1), gkd_logits(2).flatten(0, 1)
    x = student.to(dtype).requires_grad_()
    eye = torch.eye(x.shape[1], dtype=dtype)
    teacher = TeacherStates(teachers.to(dtype), eye, len(eye))
    batch = PackedBatch.pack([[0] * (len(labels) + 1)], dtype=dtype)
    heat = torch.full((len(batch),), keys.pop("temperature", 1.0), dtype=dtype)
    counted = batch.with_fields(temperature=heat, **{ROW: torch.arange(len(batch))}).compact(
        (labels >= 0).nonzero()[:, 0]
    )
    loss = DistillationLoss(teacher=teacher, **keys)
    kinds: dict[float, Kind] = {0.0: "forward_kl", 1.0: "reverse_kl"}
    divergence = Divergence(kinds.get(loss.beta, "jsd"), loss.beta)
    rows = terms_of(student, teachers, heat[:-1], divergence)[:, labels >= 0]
    found = loss.in_head(
        x[labels >= 0],
        VocabShard(eye, 0, Axis("tp"), Products(KernelSet(head_chunk=3))),
        counted,
        loss,
    )
    mean = found.total / found.count
    tolerance = SUM_ORDER if dtype == torch.float64 else OP_FP32
    expected = torch.tensor(trl[name]["loss"], dtype=torch.float64)
    assert_sum_close(mean.double(), expected, (rows / found.count).flatten(), tolerance)
    want = torch.tensor(trl[name]["gradient"], dtype=torch.float64).view(x.shape)
    assert_close(torch.autograd.grad(mean, x)[0].double(), want, tolerance)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_top_k_above_the_vocabulary_is_the_whole_vocabulary(kind: Kind, tail: bool) -> None:
    x, shard, batch, teacher = made(4)
    results = []
    for top_k in (VOCAB, VOCAB + 1, 1 << 60):
        loss = DistillationLoss(teacher=teacher, divergence=kind, top_k=top_k, tail=tail)
        total = loss.in_head(x, shard, batch, loss).total
        assert torch.isfinite(total)
        results.append((total, *torch.autograd.grad(total, (x, shard.weight))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert all(bool(torch.isfinite(each).all()) for each in results[0])


def test_without_a_gradient_and_of_nothing() -> None:
    x, shard, batch, teacher = made(4)
    for top_k in (0, 3):
        loss = DistillationLoss(teacher=teacher, top_k=top_k)
        with torch.no_grad():
            assert torch.equal(
                loss.in_head(x, shard, batch, loss).total, loss.in_head(x, shard, batch, loss).total
            )
        none = batch.compact(torch.empty(0, dtype=torch.int64))
        found = loss.in_head(x[:0], shard, none, loss)
        dx, dw = torch.autograd.grad(found.total, (x, shard.weight), materialize_grads=True)
        assert found.total == 0 and not dx.any() and not dw.any()


def test_half_precision_of_the_model_keeps_the_divergence_exact() -> None:
    x, shard, batch, teacher = made(4, torch.bfloat16)
    loss = DistillationLoss(teacher=teacher, beta=0.3)
    found = loss.in_head(x, shard, batch, loss)
    exact_x, exact_w = (v.detach().double().requires_grad_() for v in (x, shard.weight))
    states = TeacherStates(teacher.hidden.double(), teacher.weight.double(), VOCAB)
    expected = whole(exact_x, exact_w, batch, DistillationLoss(teacher=states, beta=0.3))
    want = torch.autograd.grad(expected.total, (exact_x, exact_w))
    assert_close(found.total.double(), expected.total, OP_BF16)
    for a, b in zip(torch.autograd.grad(found.total, (x, shard.weight)), want, strict=True):
        assert_close(a.double(), b, 2 * OP_BF16)  # logits of a CPU are rounded, too


def test_sampled_tokens_follow_the_reverse_kl() -> None:
    """Averaged over samples its gradient is that of KL(p, q): here over every token, weighted by p."""
    draw = torch.Generator().manual_seed(0)
    z, w = (torch.randn(1, VOCAB, generator=draw, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    a, b = z.log_softmax(-1), w.log_softmax(-1)
    (want,) = torch.autograd.grad((a.exp() * (a - b)).sum(), z, retain_graph=True)
    batch = PackedBatch.pack([[*range(VOCAB), 0]], dtype=torch.float64)
    p = a.detach().exp()[0]
    batch = batch.compact(batch.mask.nonzero()[:, 0]).with_fields(
        teacher_logprob=b[0], weight=p, count=p
    )
    for fields in ({}, {"old_logprob": a.detach()[0]}):
        stats: Any = DistillStats(a[0], *[torch.zeros_like(p)] * 4)
        loss = SampledReverseKL()(stats, batch.with_fields(**fields))
        (found,) = torch.autograd.grad(loss.total, z, retain_graph=True)
        assert_close(found, want, SUM_ORDER)
        assert float(loss.metrics["sampled_reverse_kl"].total) == pytest.approx(
            float((a[0] - b[0]).detach().sum())
        )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_row_kernels_equal_the_reference() -> None:
    """Triton's interpreter rounds results to bfloat16 towards zero, by less than OP_BF16 = 2^-7."""
    found = json.loads(output_of(template, "tests.helpers.divergence_rows", TRITON_INTERPRET="1"))
    assert len(found) == 12
    for case, errors in found.items():
        for what, error in errors.items():
            assert error <= (OP_BF16 if "bfloat16" in what else OP_FP32), (case, what)
