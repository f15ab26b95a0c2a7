"""What a step does beside its numbers: recomputation, clipping, skipping, precision, and engines beside each other."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.models import one_rank
from dovetail.batch.loss import Loss, Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.layout_bodies import BUDGET, made, tokenwise
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.parity_reference import (
    make_batch,
    objective,
    read_reference,
    value_objective,
    write_reference,
)
from tests.helpers.probe import PROBE, gradients, parameters
from tests.helpers.tolerances import (
    EXACT,
    MODEL_FP32,
    SUM_ORDER,
    assert_all_close,
    assert_close,
    tensor_error,
    worst_error,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "llama_one_kv_head", "qwen2_window", "qwen3_window"):
        save_tiny(tiny_configs()[name], folder / name)
    return folder


class AttentionRuns(TorchDispatchMode):
    """Counts attention kernels, forward and backward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "attention" in name or "softmax" in name:
            self.seen["backward" if "backward" in name else "forward"] += 1
        return func(*args, **(kwargs or {}))


def recomputed(
    path: Path,
    layout: Layout,
    recompute: Recompute,
    offload: bool = False,
    budget: int | None = None,
) -> tuple[dict[str, Tensor], Counter[str]]:
    options = EngineOptions(
        optim=PROBE, recompute=recompute, offload_activations=offload, tokens_per_batch=budget
    )
    engine = from_pretrained(
        path, layout=layout, dtype=torch.float64, device="cpu", options=options
    )
    with AttentionRuns() as runs:
        engine.train_step(make_batch(torch.float64), tokenwise)
    return gradients(engine)[0], runs.seen


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", Layout(tp=2)), ("qwen3_window", Layout())], ids=str
)
def test_recomputation_changes_no_gradient_and_selective_runs_attention_once(
    folder: Path, name: str, layout: Layout
) -> None:
    """Windowed layers too, whose attention takes a mask. Full recomputation runs the forward kernels twice."""
    kinds: tuple[Recompute, ...] = ("none", "full", "selective")
    found = {kind: run(layout.num_ranks, recomputed, folder / name, layout, kind) for kind in kinds}
    for rank in range(layout.num_ranks):
        expected, once = found["none"][rank]
        assert once["forward"] > 0
        for kind in kinds[1:]:
            assert worst_error(found[kind][rank][0], expected)[0] == EXACT, kind
        assert found["full"][rank][1]["forward"] == 2 * once["forward"]
        assert found["selective"][rank][1]["forward"] == once["forward"]
        assert found["selective"][rank][1]["backward"] == once["backward"]


def test_what_waits_on_the_host_changes_no_gradient(folder: Path) -> None:
    """Several micro-batches of a pipeline are alive at once, each with memory of its own."""
    layout = Layout(pp=2)
    expected = run(2, recomputed, folder / "qwen2_window", layout, "none", False, BUDGET)
    for recompute in ("light", "selective"):
        found = run(2, recomputed, folder / "qwen2_window", layout, recompute, True, BUDGET)
        for (grads, runs), (wanted, once) in zip(found, expected, strict=True):
            assert worst_error(grads, wanted)[0] == EXACT
            assert runs == once


def test_offloading_is_refused_where_it_would_do_nothing(folder: Path) -> None:
    refused = {
        "activation_checkpointing=selective": EngineOptions(offload_activations=True),
        "model.engine=native": EngineOptions(
            offload_activations=True, recompute="full", engine="transformers"
        ),
        "mlp_tile_tokens": EngineOptions(recompute="light", mlp_tile_tokens=4),
    }
    for told, options in refused.items():
        with one_rank(), pytest.raises(ConfigError, match=told):
            from_pretrained(folder / "llama", device="cpu", options=options)


def skipping(path: Path, layout: Layout) -> None:
    optim = OptimSettings(lr=1e-2, schedule="linear", warmup_steps=3, total_steps=9)
    engine, twin = made(path, layout, optim), made(path, layout, optim)
    batch = make_batch(torch.float64)
    before = parameters(engine)[0]
    poison = batch.fields["w0"].clone()
    poison[int(batch.mask.nonzero()[-1])] = float("inf")  # one token, so one replica sees it
    report = engine.train_step(batch.with_fields(w0=poison), objective)
    assert report.skipped
    assert report.lr == pytest.approx(1e-2 / 4)
    assert engine.optimizer.steps == 0
    assert not engine.optimizer.rule.state, "a skipped step left moments"
    assert all(shard.source.grad is None for shard in engine.optimizer.shards)
    assert worst_error(parameters(engine)[0], before)[0] == EXACT
    for wanted in (1, 2):
        report, other = engine.train_step(batch, objective), twin.train_step(batch, objective)
        assert (report, report.skipped) == (other, False)
        assert report.lr == pytest.approx(1e-2 * wanted / 4)
    assert worst_error(parameters(engine)[0], parameters(twin)[0])[0] == EXACT
    assert worst_error(parameters(engine)[0], before)[0] > MODEL_FP32


def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(folder: Path) -> None:
    run(4, skipping, folder / "llama", Layout(tp=2, dp=2))


def clipped(path: Path, layout: Layout) -> None:
    batch = make_batch(torch.float64)
    free = made(path, layout)
    norm = free.train_step(batch, objective).grad_norm
    raw = gradients(free)[0]
    whole = torch.stack([g.square().sum() for g in raw.values()]).sum().sqrt()
    assert_close(torch.tensor(norm, dtype=torch.float64), whole, SUM_ORDER)
    for limit, factor in ((norm / 4, 0.25), (norm * 4, 1.0)):
        engine = made(path, layout, OptimSettings(lr=0.0, betas=(0.0, 0.95), clip_norm=limit))
        assert engine.train_step(batch, objective).grad_norm == pytest.approx(norm, abs=SUM_ORDER)
        expected = {
            name: g * (limit / (norm + 1e-6) if factor < 1.0 else 1.0) for name, g in raw.items()
        }
        assert_all_close(gradients(engine)[0], expected, SUM_ORDER)


def test_clipping_is_by_the_norm_of_the_whole_gradient(folder: Path) -> None:
    """With copies of key-value heads and replicated norms among the pieces: each element counts once."""
    for layout in (Layout(dp=2), Layout(tp=2)):
        run(2, clipped, folder / "llama_one_kv_head", layout)


def unlearned(path: Path, layout: Layout) -> None:
    """A step in which nothing counts."""
    engine = made(path, layout)
    batch = make_batch(torch.float64)
    report = engine.train_step(batch.with_mask(torch.zeros_like(batch.mask)), objective)
    assert (report.grad_norm, report.skipped, report.faults) == (0.0, True, {})
    assert all(map(math.isnan, (report.loss, *report.metrics.values()))), "means of nothing"
    assert (engine.updates, dict(engine.optimizer.rule.state)) == (0, {})


def test_a_batch_without_counted_tokens_is_no_step(folder: Path) -> None:
    for layout in (Layout(), Layout(tp=2, dp=2)):
        run(layout.num_ranks, unlearned, folder / "llama", layout)


def named_by_tokens(stats: TokenStats, batch: PackedBatch) -> Loss:
    """Of a likelihood, with a metric for targets of each kind that there is."""
    even = batch.targets % 2 == 0
    kinds = {"even": even, "odd": ~even}
    metrics = {
        name: Sum(stats.logprob[kind].sum(), kind.sum())
        for name, kind in kinds.items()
        if kind.any()
    }
    return Loss(-stats.logprob.sum(), batch.mask.sum(), metrics)


def told_metrics(path: Path, layout: Layout) -> dict[str, float]:
    """Of a step in which a replica has no even targets, another no odd ones."""
    batch = PackedBatch.pack([[1, 2, 4, 6, 8, 10], [2, 1, 3, 5]], dtype=torch.float64)
    return dict(made(path, layout).train_step(batch, named_by_tokens).metrics)


def test_a_metric_counts_where_a_loss_has_it(folder: Path) -> None:
    """On replicas with others, or with none; and the other ranks of a pipeline are told."""
    (expected,) = run(1, told_metrics, folder / "llama", Layout())
    assert expected.keys() == {"even", "odd"}
    for layout in (Layout(dp=4), Layout(pp=2, dp=2)):
        for found in run(layout.num_ranks, told_metrics, folder / "llama", layout):
            assert found == pytest.approx(expected, rel=SUM_ORDER)


class Watching:
    """A loss that notes what reaches it."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.seen: list[float] = []

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        self.dtypes |= {
            stats.logprob.dtype,
            stats.entropy.dtype,
            *(x.dtype for x in batch.fields.values()),
        }
        self.seen += batch.fields["old"].tolist()
        return Loss((stats.logprob * batch.fields["old"]).sum(), batch.mask.sum())


def narrow(path: Path, layout: Layout) -> list[float]:
    """The field values that a loss sees under bfloat16 computation; masters and gradients stay float32."""
    engine = from_pretrained(
        path, layout=layout, dtype=torch.bfloat16, device="cpu", options=EngineOptions(optim=PROBE)
    )
    batch = make_batch()
    exact = 1.0 + torch.arange(len(batch)) * 2.0**-20  # none of them is a bfloat16
    loss = Watching()
    engine.train_step(batch.with_fields(old=exact, temperature=exact), loss)
    assert loss.dtypes == {torch.float32}
    assert {s.local.dtype for s in engine.optimizer.shards} == {torch.float32}
    assert {state["exp_avg"].dtype for state in engine.optimizer.rule.state.values()} == {
        torch.float32
    }
    return loss.seen


def test_fields_reach_the_loss_in_float32(folder: Path) -> None:
    batch = make_batch()
    expected = (1.0 + torch.arange(len(batch)) * 2.0**-20)[batch.mask].tolist()
    for layout in (Layout(), Layout(tp=2, dp=2)):
        found = run(layout.num_ranks, narrow, folder / "llama", layout)
        seen = [value for rank in range(0, layout.num_ranks, layout.tp) for value in found[rank]]
        assert sorted(seen) == sorted(expected)


def beside(actor: Path, critic: Path) -> None:
    """An actor on tp=2,dp=2, the same one on tp=4, and a critic on dp=4, step by step in turn on four ranks."""
    (outputs, grads), (values, value_grads) = read_reference(actor), read_reference(critic)
    options = EngineOptions(optim=PROBE, tokens_per_batch=BUDGET)

    def engine(path: Path, layout: Layout, head: Any = "lm"):
        return from_pretrained(
            path / "model", layout=layout, head=head, device="cpu", options=options
        )

    first, second = engine(actor, Layout(tp=2, dp=2)), engine(actor, Layout(tp=4))
    third = engine(critic, Layout(dp=4), "value")
    batch = make_batch()
    scores = [first.score(batch), second.score(batch)]
    found = third.values(batch)
    for one in (first, third, second):
        one.train_step(batch, value_objective if one is third else objective)
    for one, wanted in ((second, grads), (first, grads), (third, value_grads)):
        assert_all_close(gradients(one)[0], wanted, MODEL_FP32)
    streams = [one.weights() for one in (first, second)]
    for (name, a), (other, b) in zip(*streams, strict=True):
        assert name == other
        assert torch.equal(a, b), name
    again = [second.score(batch), first.score(batch)]
    assert torch.equal(again[1].logprob, scores[0].logprob)
    assert torch.equal(again[0].entropy, scores[1].entropy)
    assert tensor_error(found, values["values"]) <= MODEL_FP32
    for stats in scores:
        assert tensor_error(stats.logprob, outputs["logprob"]) <= MODEL_FP32


def test_engines_of_different_layouts_live_side_by_side(tmp_path: Path) -> None:
    actor = write_reference("qwen2_tied", tmp_path / "actor")
    run(4, beside, actor, write_reference("qwen2", tmp_path / "critic", values=True))


def test_schedules_rise_hold_and_fall() -> None:
    def shape(
        kind: Any, total: int = 10, warmup: int = 0, floor: float = 0.0, decay: int | None = None
    ) -> list[float]:
        settings = OptimSettings(
            schedule=kind,
            warmup_steps=warmup,
            total_steps=total,
            min_lr_ratio=floor,
            decay_steps=decay,
        )
        return [settings.factor_at(step) for step in range(12)]

    assert shape("constant") == [1.0] * 12
    assert shape("constant", warmup=3)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shape("linear", warmup=1, floor=0.2)[:2] == [0.5, 1.0]
    assert shape("linear", floor=0.1)[9:] == pytest.approx([0.1] * 3)
    assert shape("linear")[3] == pytest.approx(6 / 9)
    assert shape("cosine")[0] == 1.0
    assert shape("cosine", total=11)[5] == pytest.approx(0.5)
    assert shape("cosine")[9:] == pytest.approx([0.0] * 3)
    assert shape("linear", warmup=1, decay=3)[:5] == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])
    assert shape("cosine", decay=5)[:5] == pytest.approx(shape("cosine", total=5)[:5])
    assert shape("linear", decay=99) == shape("linear")
    assert shape("wsd", decay=4) == pytest.approx([1.0] * 7 + [2 / 3, 1 / 3, 0.0, 0.0, 0.0])
    for decay in (None, 1, 2):  # a tenth of 10 steps is one
        assert shape("wsd", decay=decay, floor=0.1)[:10] == pytest.approx([1.0] * 9 + [0.1])
    for kind in ("constant", "linear", "cosine", "wsd"):
        assert min(shape(kind, warmup=2)[:1]) > 0.0, "the first step would do nothing"
        assert all(a >= b for a, b in zip(shape(kind)[1:], shape(kind)[2:], strict=False))
