"""Every layout of 1, 2, 4 and 8 ranks over tp x pp x cp x dp equals one rank, in float64 to the order of sums.

`make test` runs one or two cases on layouts that have each pair of axes, and each axis with each schedule, model, batch and
loss, with few layers where there are few stages; `make soak` a fifth of all cases on every layout.
"""

from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.errors import LayoutError
from dovetail.factory.layouts import check_layout
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.matrix import (
    LOSSES,
    RECIPES,
    Case,
    layouts,
    models,
    name_of,
    step_error,
    write_models,
)
from tests.helpers.matrix_checks import QUICK, check, folder as folder
from tests.helpers.tolerances import SUM_ORDER

ALL_CASES = tuple(Case(*each) for each in product(models(), RECIPES, LOSSES, (1, 3)))
EXTRA = (  # what the factorizations leave out: modes that are not the default, splits by hand, more stages
    Layout(cp=2, cp_mode="gather"),
    Layout(cp=4, cp_mode="gather", dp=2),
    Layout(cp=8, cp_mode="gather"),
    Layout(cp=4, cp_mode="product", tp=2),
    Layout(cp=8, cp_mode="product"),
    Layout(cp=4, cp_mode="ulysses"),
    Layout(pp=2, pp_split=(1, 8)),
    Layout(pp=2, schedule="gpipe", cp=2),
    Layout(pp=2, virtual_stages=4, schedule="interleaved"),
    Layout(pp=2, virtual_stages=2, schedule="gpipe", dp=2),
    Layout(pp=4, virtual_stages=2, pp_split=(1, 1, 1, 2, 1, 1, 1, 1)),
)


@cache
def spec_of(model: str) -> ArchSpec:
    """The model's spec at its full depth."""
    return spec_from_config(models()[model].to_dict())


def fits(case: Case, layout: Layout) -> bool:
    """Whether the case's model can be cut that way; what cannot is refused, which is tested elsewhere."""
    try:
        check_layout(spec_of(case.model), layout)
    except LayoutError:
        return False
    return True


def every_layout() -> list[Layout]:
    return [layout for ranks in (1, 2, 4, 8) for layout in layouts(ranks)] + list(EXTRA)


@pytest.mark.parametrize(
    ("layout", "cases"),
    [(layout, cases) for layout, *cases in QUICK],
    ids=[name_of(layout) for layout, *_ in QUICK],
)
def test_equals_one_rank(folder: Path, layout: Layout, cases: list[Case]) -> None:
    check(folder, layout, tuple(case.on(layout) for case in cases))


def test_micro_batches_of_one_shape_are_told_apart(folder: Path) -> None:
    """Values and gradients of another one would fit as well."""
    layout = Layout(pp=2)
    check(folder, layout, (Case("llama", "alike", "value", 3).on(layout),))


def test_a_step_is_adamws_and_decays_matrices_alone(folder: Path) -> None:
    """What the comparison of layouts cannot see, since every layout would have it."""
    write_models(folder, ["llama"])
    (error,) = run(1, step_error, str(folder), Case("llama", "few", "sft"))
    assert error <= SUM_ORDER


@pytest.mark.soak
@pytest.mark.parametrize("model", models())
@pytest.mark.parametrize("layout", every_layout(), ids=name_of)
def test_whole_matrix(folder: Path, layout: Layout, model: str) -> None:
    """A fifth of the cases of each model and layout; any five layouts in a row have all of them."""
    cases = tuple(case for case in ALL_CASES if case.model == model and fits(case, layout))
    if not cases:
        pytest.skip("the model cannot be cut that way")
    check(folder, layout, cases[every_layout().index(layout) % 5 :: 5])


def test_the_selection_is_wide() -> None:
    """Each pair of axes; each schedule with each axis; each model, batch, loss and accumulation on layouts of each kind."""
    cases = [(layout, case) for layout, *some in QUICK for case in some]
    axes = ("tp", "pp", "cp", "dp")
    for axis in axes:
        cut = [case for layout, case in cases if getattr(layout, axis) > 1]
        assert {case.model for case in cut} >= set(models()) - {"llama_odd"}
        assert {case.recipe for case in cut} == set(RECIPES)
        assert {case.loss for case in cut} == set(LOSSES)
        assert {case.accumulation for case in cut} == {1, 3}
    chosen = [layout for layout, _ in cases]
    for one, other in combinations(axes, 2):
        assert any(getattr(layout, one) > 1 < getattr(layout, other) for layout in chosen)
    for schedule, axis in product(("1f1b", "zero_bubble", "interleaved"), axes):
        assert any(
            layout.schedule == schedule and layout.pp > 1 < getattr(layout, axis)
            for layout in chosen
        )
    assert {layout.cp_mode for layout in chosen if layout.cp > 1} == {
        "auto",
        "gather",
        "product",
        "ulysses",
    }
