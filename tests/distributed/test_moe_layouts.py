"""Experts cut over ep, tp, pp, cp and dp equal one rank, in float64 to the order of sums: balance losses and biases included.

Outputs, losses, loads, the gradient norm, every gradient, the parameters after a step. Batches of a few tokens leave
experts without any, batches of one sequence leave replicas without any.
"""

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from dovetail.layout import Layout
from tests.distributed.matrix import LOSSES, NO_CRITIC, RECIPES, Case, expert_models, name_of, write_models
from tests.distributed.test_matrix import check

ALL_CASES = tuple(
    case
    for case in (Case(*each) for each in product(expert_models(), RECIPES, LOSSES, (1, 3)))
    if (case.model, case.loss) != (NO_CRITIC, "value")
)
QUICK = (
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
WHOLE = tuple(
    Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
    for tp, pp, cp, dp, ep in product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4))
    if tp * pp * cp * dp <= 8 and (cp * dp) % ep == 0
)


def selection(layouts: tuple[Layout, ...], each: int) -> list[Any]:
    """Some cases a layout: a stride prime to their number takes all in turn, neighbors far apart."""
    order = cycle([ALL_CASES[i * 59 % len(ALL_CASES)] for i in range(len(ALL_CASES))])
    return [pytest.param(layout, tuple(next(order) for _ in range(each)), id=name_of(layout)) for layout in layouts]


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_models(folder, expert_models())
    return folder


@pytest.mark.parametrize(("layout", "cases"), selection(QUICK, 1))
def test_equals_one_rank(experts: Path, layout: Layout, cases: tuple[Case, ...]) -> None:
    check(experts, layout, cases)


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "cases"), selection(WHOLE, 8))
def test_all_layouts_equal_one_rank(experts: Path, layout: Layout, cases: tuple[Case, ...]) -> None:
    check(experts, layout, cases)
