"""Experts cut over ep, tp, pp, cp and dp equal one rank, in float64 to the order of sums: balance losses and biases included.

Outputs, losses, loads, the gradient norm, every gradient, the parameters after a step. Batches of a few tokens leave
experts without any, batches of one sequence leave replicas without any.
"""

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.engine.expert_routing import BalanceSettings
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.parallel.layout import Layout
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.rl.losses import weight_fields
from tests.helpers.harness import run
from tests.helpers.matrix import (
    LOSSES,
    NO_CRITIC,
    RECIPES,
    SHALLOW,
    Case,
    expert_models,
    name_of,
    path_of,
    random_batch,
    write_models,
)
from tests.helpers.matrix_checks import check
from tests.helpers.probe import PROBE
from tests.helpers.tolerances import GRADCHECK, SUM_ORDER

STEP_SIZE = 1e-5  # of a finite difference, along a gradient

ALL_CASES = tuple(
    case
    for case in (Case(*each) for each in product(expert_models(), RECIPES, LOSSES, (1, 3)))
    if (case.model, case.loss) != (NO_CRITIC, "value")
)
CUTS = (
    Layout(dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2),
    Layout(cp=2, dp=2, ep=4),
    Layout(cp=2, tp=2, ep=2),
    Layout(pp=2, dp=2, ep=2, virtual_stages=2, schedule="interleaved"),
    Layout(pp=2, tp=2, schedule="zero_bubble"),
    Layout(cp=4, cp_mode="gather", ep=2),
    Layout(pp=2, cp=2, ep=2),
)
WIDE = (
    CUTS[2],
    CUTS[4],
    CUTS[5],
    CUTS[7],
    CUTS[8],
)  # what others of them have by pairs, or test_turns.py has
WHOLE = tuple(
    Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
    for tp, pp, cp, dp, ep in product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4))
    if tp * pp * cp * dp <= 8 and (cp * dp) % ep == 0
)


def selection(layouts: tuple[Layout, ...], each: int, soak: tuple[Layout, ...] = ()) -> list[Any]:
    """Some cases a layout: a stride prime to their number takes all in turn, neighbors far apart."""
    order = cycle([ALL_CASES[i * 59 % len(ALL_CASES)] for i in range(len(ALL_CASES))])
    return [
        pytest.param(
            layout,
            tuple(next(order) for _ in range(each)),
            id=name_of(layout),
            marks=[pytest.mark.soak] * (layout in soak),
        )
        for layout in layouts
    ]


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `check` writes models."""
    return tmp_path_factory.mktemp("experts")


@pytest.mark.parametrize(("layout", "cases"), selection(CUTS, 1, soak=WIDE))
def test_equals_one_rank(experts: Path, layout: Layout, cases: tuple[Case, ...]) -> None:
    check(experts, layout, tuple(case.on(layout) for case in cases))


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "cases"), selection(WHOLE, 8))
def test_all_layouts_equal_one_rank(experts: Path, layout: Layout, cases: tuple[Case, ...]) -> None:
    check(experts, layout, cases)


def slopes(path: str, aggregation: str) -> tuple[float, float]:
    """The change of the balance terms along their own gradient, measured and foretold. Routes are given: they would jump."""
    batch = random_batch((9, 4, 17, 1), "sft", torch.float64)
    batch = batch.with_fields(**weight_fields(batch, aggregation))  # type: ignore[arg-type]
    found = []
    for coefs in ((0.0, 0.0), (0.7, 0.2)):
        options = EngineOptions(
            optim=PROBE, balance=BalanceSettings(aux_coef=coefs[0], z_coef=coefs[1])
        )
        engine = from_pretrained(path, dtype=torch.float64, device="cpu", options=options)
        batch = batch.with_routing(engine.score_and_trace(batch)[1])
        engine.train_step(batch, SFTLoss())
        found.append(
            {
                s.name: engine.optimizer.rule.state[s.local]["exp_avg"].clone()
                for s in engine.optimizer.shards
            }
        )
    slope = {name: found[1][name] - found[0][name] for name in found[0]}

    def cost(step: float) -> float:
        with torch.no_grad():
            for shard in engine.optimizer.shards:
                shard.local.add_(slope[shard.name], alpha=step)
        metrics = engine.train_step(batch, SFTLoss()).metrics
        assert batch.routing is not None
        total = 0.7 * metrics["balance_loss"] + 0.2 * metrics["router_z_loss"]
        return len(batch.routing.layers) * total

    ahead, behind = cost(STEP_SIZE), cost(-2 * STEP_SIZE)
    return (ahead - behind) / (2 * STEP_SIZE), sum(float(x.square().sum()) for x in slope.values())


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("qwen3_moe", "token"),
        ("deepseek_v3", "sequence"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("qwen3_moe", "sequence"), ("deepseek_v3", "token"))
        ),
    ],
)
def test_balance_terms_are_means_over_tokens_whatever_the_loss_counts(
    experts: Path, name: str, aggregation: str
) -> None:
    write_models(experts, [name], SHALLOW)
    ((measured, foretold),) = run(1, slopes, str(path_of(experts, name, SHALLOW)), aggregation)
    assert foretold > 0 and measured == pytest.approx(foretold, rel=GRADCHECK * 10)


def told(path: str, layout: Layout, coefs: tuple[float, float]) -> tuple[float, float]:
    """Both costs of a step, as its metrics tell them."""
    options = EngineOptions(
        optim=PROBE, balance=BalanceSettings(aux_coef=coefs[0], z_coef=coefs[1])
    )
    engine = from_pretrained(
        path, layout=layout, dtype=torch.float64, device="cpu", options=options
    )
    metrics = engine.train_step(
        random_batch((9, 4, 17, 1), "sft", torch.float64), SFTLoss()
    ).metrics
    return metrics["balance_loss"], metrics["router_z_loss"]


def test_both_costs_are_told_alike_where_only_one_is_paid(experts: Path) -> None:
    write_models(experts, ["qwen3_moe"], SHALLOW)
    path = str(path_of(experts, "qwen3_moe", SHALLOW))
    (alone,) = run(1, told, path, Layout(), (0.7, 0.2))
    for layout, coefs in ((Layout(tp=2), (0.0, 0.2)), (Layout(cp=2), (0.7, 0.0))):
        for found in run(2, told, path, layout, coefs):
            assert found == pytest.approx(alone, rel=SUM_ORDER)
