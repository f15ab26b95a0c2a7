"""The same recipe, seed and data give the same curve for every layout, and for every size of micro-batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.factory.sampler import longest_row
from dovetail.parallel.layout import Layout
from tests.golden.bugs import LAYOUT_BUGS
from tests.golden.job import Played, play, rl, sft, write_inputs
from tests.helpers.clocked import timeless
from tests.helpers.harness import run
from tests.helpers.tolerances import CURVE_FP32, RL_LOSS_FP32

LAYOUTS = ("tp=2", "dp=2", "dp=4", "tp=4")  # 4 heads on 2 key-value heads: tp 4 holds copies
SFT_STEPS, RL_STEPS = 4, 2  # the second one samples from what the first has learned
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"kl_coef": 0.1, "epochs": 2, "num_mini_batches": 2},
    "ppo": {"kl_coef": 0.05, "lam": 0.95},
    "rloo": {"aggregation": "sequence", "ratio": "sequence"},
}
RL_LAYOUTS = {"grpo": "dp=2", "ppo": "tp=2", "rloo": "tp=2"}
PATIENCE = 600.0  # seconds for one run on a busy machine


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("layouts") / "inputs")


@pytest.fixture(scope="module")
def sft_alone(inputs: Path) -> Played:
    return played_on("", sft(inputs, inputs.parent / "sft", trainer={"steps": SFT_STEPS}))


@pytest.fixture(scope="module", params=RECIPES)
def alone(inputs: Path, request: pytest.FixtureRequest) -> tuple[str, Played]:
    """Each RL algorithm on one rank."""
    name: str = request.param
    return name, played_on("", rl_recipe(inputs, name, inputs.parent / name))


def rl_recipe(inputs: Path, name: str, run_dir: Path, **sections: Any) -> dict[str, Any]:
    reward = {"import": "digit_rewards:share_of_digits"}  # a random model gets some of it
    return rl(
        inputs,
        run_dir,
        name,
        algorithm=RECIPES[name],
        reward=reward,
        trainer={"steps": RL_STEPS},
        **sections,
    )


def played_on(
    layout: str, given: Mapping[str, Any], *, bug: str = "", agree: bool = True
) -> Played:
    """The run on as many ranks as its layout has; every rank sees the same rows, unless `agree` is False.

    What `given` says of its layout beside degrees stays.
    """
    cut = Layout.parse(layout) if layout else Layout()
    section = {
        **given.get("layout", {}),
        "tp": cut.tp,
        "pp": cut.pp,
        "cp": cut.cp,
        "dp": cut.dp or "auto",
    }
    each = run(cut.num_ranks, play, {**given, "layout": section}, timeout=PATIENCE, bug=bug)
    for other in each[1:]:
        assert not agree or timeless(other.rows) == timeless(each[0].rows)
    return each[0]


def assert_same_sft(played: Played, alone: Played) -> None:
    for row, expected in zip(played.rows, alone.rows, strict=True):
        for key in ("loss", "grad_norm"):
            error = abs(row[key] / expected[key] - 1)
            assert error <= CURVE_FP32, f"{key} of step {row['step']}: {error:.1e}"


def assert_same_rl(played: Played, alone: Played) -> None:
    """By the rule of the contract: the same ids, then losses and norms."""
    assert played.ids == alone.ids
    for row, expected in zip(played.rows, alone.rows, strict=True):
        for prefix in ("", "critic_") if "critic_loss" in expected else ("",):
            a, b = row[f"{prefix}loss"], expected[f"{prefix}loss"]
            assert abs(a - b) <= RL_LOSS_FP32 * (1 + abs(b)), (
                f"{prefix}loss of step {row['step']}: {a} and {b}"
            )
            a, b = row[f"{prefix}grad_norm"], expected[f"{prefix}grad_norm"]
            assert abs(a / b - 1) <= CURVE_FP32, (
                f"{prefix}grad_norm of step {row['step']}: {a} and {b}"
            )


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
