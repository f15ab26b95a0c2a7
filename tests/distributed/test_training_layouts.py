"""The same recipe, seed and data give the same curve for every layout, and for every size of micro-batch."""

from pathlib import Path

import pytest

from dovetail.factory.sampler import longest_row
from tests.golden.bugs import LAYOUT_BUGS
from tests.golden.job import Played, sft
from tests.helpers.training_layouts import (
    SFT_STEPS,
    alone as alone,
    assert_same_rl,
    assert_same_sft,
    inputs as inputs,
    played_on,
    rl_recipe,
)

LAYOUTS = ("tp=2", "dp=2", "dp=4", "tp=4")  # 4 heads on 2 key-value heads: tp 4 holds copies
RL_LAYOUTS = {"grpo": "dp=2", "ppo": "tp=2", "rloo": "tp=2"}


@pytest.fixture(scope="module")
def sft_alone(inputs: Path) -> Played:
    return played_on("", sft(inputs, inputs.parent / "sft", trainer={"steps": SFT_STEPS}))


@pytest.mark.parametrize(
    "layout", ["tp=2,dp=2", *(pytest.param(name, marks=pytest.mark.soak) for name in LAYOUTS)]
)
def test_the_sft_curve_is_that_of_one_rank(inputs: Path, sft_alone: Played, layout: str) -> None:
    given = sft(inputs, inputs.parent / f"sft-{layout}", trainer={"steps": SFT_STEPS})
    assert_same_sft(played_on(layout, given), sft_alone)


@pytest.mark.parametrize("layout", LAYOUT_BUGS)
def test_a_sum_left_out_shows_in_the_curve(inputs: Path, sft_alone: Played, layout: str) -> None:
    run_dir = inputs.parent / f"sft-{layout}-wrong"
    wrong = played_on(layout, sft(inputs, run_dir, trainer={"steps": 1}), bug=layout, agree=False)
    with pytest.raises(AssertionError, match="of step 1:"):
        assert_same_sft(wrong, sft_alone)


@pytest.mark.parametrize("budget", [8, 30, 64])
def test_the_sft_curve_does_not_depend_on_the_micro_batches(
    inputs: Path, sft_alone: Played, budget: int
) -> None:
    """8 tokens are one row; 30 are not a multiple of rows."""
    trainer = {"steps": SFT_STEPS, "tokens_per_batch": budget}
    assert_same_sft(
        played_on("", sft(inputs, inputs.parent / f"sft-{budget}", trainer=trainer)), sft_alone
    )


@pytest.mark.parametrize(
    "layout", ["", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tp=2,dp=2", "dp=4"))]
)
def test_rl_curves_are_those_of_one_rank(
    inputs: Path, alone: tuple[str, Played], layout: str
) -> None:
    """Each algorithm on a layout of its own; `make soak` has all on all."""
    name, expected = alone
    layout = layout or RL_LAYOUTS[name]
    assert_same_rl(
        played_on(layout, rl_recipe(inputs, name, inputs.parent / f"{name}-{layout}")), expected
    )


@pytest.mark.soak  # test_training_pipelines.py has one with stages, too
def test_every_model_may_have_a_layout_of_its_own(inputs: Path) -> None:
    """Policy tp=2,dp=2; critic tp=4; reference dp=4; sampler tp=2,dp=2: the numbers of one rank."""
    given = rl_recipe(inputs, "ppo", inputs.parent / "ppo-one")
    own = rl_recipe(
        inputs,
        "ppo",
        inputs.parent / "ppo-own",
        critic={"layout": {"tp": 4}},
        reference={"layout": {"dp": 4}},
        rollout={"layout": {"tp": 2, "dp": 2}},
    )
    assert_same_rl(played_on("tp=2,dp=2", own), played_on("", given))


@pytest.mark.parametrize("multiples", [(1,), (8,), (4, 6), (3, 4, 12)])
def test_a_row_is_kept_if_it_fits_a_micro_batch_of_every_model(multiples: tuple[int, ...]) -> None:
    """cp=3 pads to 6 tokens and cp=2 to 4, for six ranks may hold models of both layouts."""
    for budget in range(30):
        fitting = [n for n in range(budget + 1) if all(-(-n // m) * m <= budget for m in multiples)]
        assert longest_row(budget, multiples) == fitting[-1]
