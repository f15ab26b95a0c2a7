"""Router replay: a trace recorded in one pass routes another, under any layout, recomputed or not."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.batch.loss import Loss
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.batch.routing import RoutingTrace
from dovetail.engine.native import Engine
from dovetail.errors import DataError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.moe import Router
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.matrix import (
    STEP,
    expert_models,
    figures_of,
    measure,
    name_of,
    path_of,
    random_batch,
    write_models,
)
from tests.helpers.parity_configs import tiny_model
from tests.helpers.probe import gradients
from tests.helpers.tolerances import EXACT, SUM_ORDER, max_abs, worst_error

DEPTH = 6  # layers for four stages; two with experts in one model, four in the other
LENGTHS = (7, 1, 19, 2, 33, 5)
MODELS = ("qwen2_moe", "deepseek_v3")  # dense layers between, and first; shared experts in both
LAYOUTS = (
    Layout(tp=2),
    Layout(cp=2, ep=2),
    Layout(dp=2, ep=2),
    Layout(pp=2, virtual_stages=2, schedule="interleaved"),
    Layout(tp=2, cp=2, ep=2),
)
PAIRS = [*product(MODELS, LAYOUTS)]
QUICK = (("qwen2_moe", LAYOUTS[2]),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    write_models(folder, MODELS, DEPTH)
    return folder


def engine_of(folder: Path | str, layout: Layout | None = None, **options: Any) -> Engine:
    chosen = EngineOptions(**{"optim": STEP, "tokens_per_batch": 48, **options})
    return from_pretrained(
        folder, layout=layout or Layout(), dtype=torch.float64, device="cpu", options=chosen
    )


def batch_of(loss: str = "grpo") -> PackedBatch:
    return random_batch(LENGTHS, loss, torch.float64)


def random_trace(engine: Engine, tokens: int) -> RoutingTrace:
    """Distinct experts for nine tokens of ten; what it says of the others is nonsense that nobody may read."""
    assert isinstance(engine.model.spec, ArchSpec) and engine.model.spec.moe is not None
    moe = engine.model.spec.moe
    draw = torch.Generator().manual_seed(5)
    ranks = torch.rand(tokens, len(moe.numbers), moe.num_experts, generator=draw)
    indices, valid = (
        ranks.topk(moe.top_k).indices.to(torch.int32),
        torch.rand(tokens, generator=draw) < 0.9,
    )
    indices[~valid] = moe.num_experts + 7
    return RoutingTrace(moe.numbers, indices, valid)


def recorded(path: str, layout: Layout) -> tuple[RoutingTrace, bool, bool, bool, float]:
    """What a pass recorded; and whether replaying it gives equal bits, other weights other routes, and the same replayed."""
    engine, batch = engine_of(path, layout), batch_of()
    stats, trace = engine.score_and_trace(batch)
    again, twice = engine.score_and_trace(batch.with_routing(trace))
    same_bits = all(map(torch.equal, stats, again)) and torch.equal(twice.indices, trace.indices)
    for shard in engine.optimizer.shards:
        if shard.name.endswith("gate.weight"):
            with torch.no_grad():
                shard.local.mul_(-1)
    _, live = engine.score_and_trace(batch)
    report = engine.train_step(batch.with_routing(trace), _objective, trace=True)
    assert report.routing is not None
    grads, _ = gradients(engine)
    router = min(max_abs(grad) for name, grad in grads.items() if name.endswith("gate.weight"))
    return (
        trace,
        same_bits,
        torch.equal(live.indices, trace.indices),
        torch.equal(report.routing.indices, trace.indices),
        router,
    )


@functools.cache
def recorded_alone(path: str) -> tuple[RoutingTrace, bool, bool, bool, float]:
    return run(1, recorded, path, Layout())[0]


def _objective(stats: Any, batch: PackedBatch) -> Loss:
    return Loss((stats.logprob + stats.entropy**2).sum(), batch.mask.sum())


RECORDED = (
    ("deepseek_v3", LAYOUTS[0]),
    ("qwen2_moe", LAYOUTS[1]),
    ("qwen2_moe", LAYOUTS[3]),
    ("deepseek_v3", Layout()),
)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *RECORDED,
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in PAIRS if pair not in RECORDED),
    ],
    ids=lambda x: name_of(x) if isinstance(x, Layout) else x,
)
def test_a_replayed_pass_is_the_recorded_one(folder: Path, name: str, layout: Layout) -> None:
    path = str(path_of(folder, name, DEPTH))
    alone, *_ = recorded_alone(path)
    for trace, same_bits, live_same, replay_same, router in run(
        layout.num_ranks, recorded, path, layout
    ):
        assert same_bits
        assert torch.equal(trace.indices, alone.indices) and trace.layers == alone.layers
        assert replay_same and not live_same
        assert router > 0


def replayed(path: str, layout: Layout, options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """All that a step with a random trace shows."""
    engine, batch = engine_of(path, layout, **options), batch_of()
    return measure(engine, batch.with_routing(random_trace(engine, len(batch))), "grpo")


@functools.cache
def replayed_alone(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step of one rank with the random trace, and one without."""
    return run(1, replayed, path, Layout(), {})[0][0], run(1, _live, path)[0][0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*pair, marks=[pytest.mark.soak] * (pair not in QUICK)) for pair in PAIRS],
    ids=[f"{name}-{name_of(layout)}" for name, layout in PAIRS],
)
def test_a_trace_means_the_same_under_every_layout(folder: Path, name: str, layout: Layout) -> None:
    path = str(path_of(folder, name, DEPTH))
    alone, live = replayed_alone(path)
    assert worst_error(live["grads"], alone["grads"])[0] > SUM_ORDER  # the trace does something
    for recompute in ("none", "full"):
        for found, stray in run(layout.num_ranks, replayed, path, layout, {"recompute": recompute}):
            figures = figures_of(found, stray, alone)
            assert figures.worst <= SUM_ORDER, (recompute, figures)


def _live(path: str) -> tuple[dict[str, Any], float]:
    return measure(engine_of(path), batch_of(), "grpo")


class Fickle:
    """Chooses among equal scores, and every time otherwise, as kernels may. Each expert gets as many tokens as before, so that
    no shape tells.
    """

    def __init__(self, router: Router) -> None:
        self.router, self.calls = router, 0

    def __call__(self, scores: Tensor) -> Tensor:
        self.calls += 1
        moe = self.router.moe
        in_turn = torch.arange(len(scores))[:, None] + torch.arange(moe.top_k)
        return (in_turn % moe.num_experts).roll(self.calls - 1, 0)


def tied(path: str, recompute: str, replay: bool) -> tuple[dict[str, Tensor], int]:
    """The gradients of a model whose router logits are all equal, and how often its first router was asked."""
    engine, batch = engine_of(path, recompute=recompute, tokens_per_batch=None), batch_of()
    fickle = []
    for module in engine.model.modules():
        if isinstance(module, Router):
            module.best = Fickle(module)  # type: ignore[method-assign]
            fickle.append(module.best)
    for shard in engine.optimizer.shards:
        if shard.name.endswith("gate.weight"):
            with torch.no_grad():
                shard.local.zero_()
    engine.train_step(
        batch.with_routing(random_trace(engine, len(batch)) if replay else None), _objective
    )
    return gradients(engine)[0], fickle[0].calls


@pytest.mark.parametrize("replay", [False, True])
def test_recomputation_takes_the_experts_of_the_first_forward(folder: Path, replay: bool) -> None:
    """Tied logits: were the choice made again, it would be another one."""
    path = str(path_of(folder, "qwen2_moe", DEPTH))
    ((kept, _),) = run(1, tied, path, "none", replay)
    for recompute in ("full", "selective"):
        ((found, calls),) = run(1, tied, path, recompute, replay)
        assert worst_error(found, kept)[0] == EXACT
        assert calls == 1


def _many(path: str) -> tuple[int, bool]:
    """The largest expert that is chosen, and whether its replay gives equal bits."""
    engine = from_pretrained(path, dtype=torch.float32, device="cpu")
    batch = PackedBatch.pack([torch.arange(40), torch.arange(50)])
    stats, trace = engine.score_and_trace(batch)
    return int(trace.indices.max()), all(
        map(torch.equal, stats, engine.score(batch.with_routing(trace)))
    )


@pytest.mark.parametrize("experts", [pytest.param(300, marks=pytest.mark.soak), 70_000])
def test_edge_36_experts_beyond_any_narrow_type_and_dense_layers_before(
    tmp_path: Path, experts: int
) -> None:
    config = expert_models()["qwen3_moe"]
    shape = {
        "hidden_size": 8,
        "moe_intermediate_size": 2,
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
    }
    for key, value in {**shape, "num_experts": experts, "num_experts_per_tok": 8}.items():
        setattr(config, key, value)
    config.layer_types = None
    model = tiny_model(config)
    config.save_pretrained(tmp_path)
    save_file(
        {k: x.contiguous() for k, x in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    ((largest, same),) = run(1, _many, str(tmp_path))
    assert largest > experts // 2 and same


def _partly(path: str) -> dict[str, bool]:
    """Rollouts that lack the final token, a stretch, or all but the prompt; and a batch that is padded."""
    engine = engine_of(path, tokens_per_batch=None)
    rows = [torch.arange(n).tolist() for n in (9, 12, 5)]
    plain = PackedBatch.pack(rows)
    stats, trace = engine.score_and_trace(plain)
    nonsense = torch.zeros_like(trace.indices)
    gaps = torch.ones(len(plain), dtype=torch.bool)
    gaps[[8, 20, 25, 12, 13, 14, 23, 24]] = False
    holed = RoutingTrace(
        trace.layers, torch.where(gaps[:, None, None], trace.indices, nonsense), gaps
    )
    by_row = [plain.with_routing(holed).select([i]).routing for i in range(3)]
    assert by_row[0] is not None
    packed = PackedBatch.pack(
        [Sequence(row, routing=each) for row, each in zip(rows, by_row, strict=True)]
    )
    given, found = engine.score_and_trace(packed)
    report = engine.train_step(packed.select([2, 0]), _objective, trace=True)
    assert report.routing is not None
    refusals = {}
    for what, rows_ in {
        "a sequence without routing": [Sequence(rows[0], routing=by_row[0]), Sequence(rows[1])],
        "routing that is one token short": [
            Sequence(rows[0], routing=by_row[0].map(lambda x: x[:-1]))
        ],
    }.items():
        refusals[what] = _refused(lambda rows_=rows_: PackedBatch.pack(rows_))  # type: ignore[misc]
    wrapped = replace(trace, indices=trace.indices - 1)
    fewer = replace(trace, layers=trace.layers[:-1], indices=trace.indices[:, :-1])
    return {
        "equal bits": all(map(torch.equal, stats, given))
        and torch.equal(found.indices, trace.indices),
        "selected": torch.equal(report.routing.indices, trace.indices[plain.token_index([2, 0])]),
        "an expert that is none": _refused(lambda: engine.score(plain.with_routing(wrapped))),
        "a layer without data": _refused(lambda: engine.score(plain.with_routing(fewer))),
        **refusals,
    }


def _refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except DataError:
        return True
    return False


def test_edge_37_gaps_are_routed_live_and_what_is_missing_raises(folder: Path) -> None:
    (found,) = run(1, _partly, str(path_of(folder, "deepseek_v3", DEPTH)))
    assert all(found.values()), found


def _in_mode(path: str, mode: Callable[[], AbstractContextManager[Any]]) -> dict[str, Tensor]:
    """The gradients of a step along routes that were told in that mode."""
    engine, batch = engine_of(path), batch_of()
    with mode():
        _, trace = engine.score_and_trace(batch)
    engine.train_step(batch.with_routing(trace), _objective)
    return gradients(engine)[0]


def test_a_scripts_modes_do_not_reach_what_tells_routes(folder: Path) -> None:
    path = str(path_of(folder, "qwen2_moe", DEPTH))
    (plain,) = run(1, _in_mode, path, nullcontext)
    (found,) = run(1, _in_mode, path, torch.inference_mode)
    assert worst_error(found, plain)[0] == EXACT


def _loads(path: str, layout: Layout) -> dict[str, float]:
    engine = engine_of(path, layout, tokens_per_batch=None)
    return dict(engine.train_step(PackedBatch.pack([[1, 2, 3]]), _objective).metrics)


def test_edge_37_padding_loads_no_expert(folder: Path) -> None:
    """Three tokens, padded to eight by the layout."""
    path = str(path_of(folder, "qwen2_moe", DEPTH))
    (alone,) = run(1, _loads, path, Layout())
    for found in run(4, _loads, path, Layout(cp=2, tp=2)):
        assert found == pytest.approx(alone, rel=SUM_ORDER)


def _interrupted(path: str, layout: Layout, disturb: bool) -> dict[str, Tensor]:
    """The gradients of a replayed step; `disturb`: after another model, an evaluation, and a step that failed."""
    engine, batch = engine_of(path, layout, recompute="full"), batch_of()
    trace = random_trace(engine, len(batch))
    if disturb:
        other = engine_of(path, Layout(dp=layout.num_ranks))
        other.score(batch.select([0, 2]).with_routing(None))
        engine.score(batch)
        with pytest.raises(ZeroDivisionError):
            engine.train_step(batch.with_routing(trace.map(lambda x: x.flip(0))), _failing)
        engine.optimizer.zero_grad()
        other.train_step(batch, _objective)
    engine.train_step(batch.with_routing(trace), _objective)
    return gradients(engine)[0]


def _failing(stats: Any, _: PackedBatch) -> Loss:
    raise ZeroDivisionError(f"a loss of the user's own, of {len(stats)} statistics")


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(), marks=pytest.mark.soak), Layout(dp=2, ep=2)], ids=name_of
)
def test_edge_38_and_39_other_passes_and_models_leave_no_trace(
    folder: Path, layout: Layout
) -> None:
    path = str(path_of(folder, "deepseek_v3", DEPTH))
    for alone, found in zip(
        run(layout.num_ranks, _interrupted, path, layout, False),
        run(layout.num_ranks, _interrupted, path, layout, True),
        strict=True,
    ):
        assert worst_error(found, alone)[0] == EXACT
