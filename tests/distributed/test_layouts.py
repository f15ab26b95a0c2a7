"""A model trained on any layout is the model trained on one rank: in float64 to the order of sums, in float32 its curves."""

from pathlib import Path

import pytest
import torch

from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.layout_bodies import BUDGET, Flat, curve, curves, everything
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.tolerances import CURVE_FP32, SUM_ORDER, tensor_error, worst_error

NAMES = ("llama_biases", "qwen2_tied", "qwen3_window")
LONG = ("dp=1", "tp=2,dp=2", "dp=2", "tp=2", "tp=4", "tp=8", "tp=4,dp=2", "tp=2,dp=4", "dp=4")


def each(
    name: str, layout: str, models: tuple[str, ...], budget: int | None = BUDGET
) -> dict[str, Flat]:
    """Some models on one layout; all ranks' results are the same."""
    return {model: everything(Path(name) / model, Layout.parse(layout), budget) for model in models}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        save_tiny(tiny_configs()[name], folder / name)
    return folder


class Alone(dict[str, Flat]):
    """What one rank gives for a model when it is first asked for, the whole batch at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __missing__(self, model: str) -> Flat:
        self |= run(1, each, self.folder, "dp=1", (model,), None)[0]
        return self[model]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder)


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        ("dp=3", NAMES[:1]),  # test_matrix.py has other layouts, too
        *(pytest.param(layout, NAMES, marks=pytest.mark.soak) for layout in ("dp=3", *LONG)),
    ],
)
def test_float64_equals_one_rank(
    folder: Path, alone: Alone, layout: str, models: tuple[str, ...]
) -> None:
    """Statistics, loss, norm, every gradient, and parameters after two clipped AdamW steps, micro-batches and all.

    Batches with fewer sequences than replicas are among them: a rank without tokens in a micro-batch, or in the whole
    step, changes nothing.
    """
    for found in run(Layout.parse(layout).num_ranks, each, str(folder), layout, models):
        for model in models:
            assert set(found[model]) == set(alone[model])
            for kind in ("all", "few", "one", "gspo", "trained"):
                mine, expected = (
                    {k: v for k, v in flat.items() if k.startswith(f"{kind}.")}
                    for flat in (found[model], alone[model])
                )
                grads = [
                    {k: v for k, v in flat.items() if ".grad." in k or kind == "trained"}
                    for flat in (mine, expected)
                ]
                error, name = worst_error(*grads)
                assert error <= SUM_ORDER, f"{model} {name}: {error:.2e}"
                for name in set(mine) - set(grads[0]):
                    error = tensor_error(mine[name], expected[name])
                    assert error <= SUM_ORDER, f"{model} {name}: {error:.2e}"


def test_a_norm_that_counts_copies_twice_is_noticed(folder: Path, alone: Alone) -> None:
    """The mutation: clipping by more than the true norm shows in the trained parameters."""
    expected = alone["llama_biases"]
    for found in run(2, everything, folder / "llama_biases", Layout(tp=2), wrong=True):
        trained = [
            {k: v for k, v in flat.items() if k.startswith("trained.")}
            for flat in (found, expected)
        ]
        assert worst_error(*trained)[0] > SUM_ORDER


@pytest.fixture(scope="module")
def curve_alone(folder: Path) -> torch.Tensor:
    """The curve of one rank, each step's batch at once."""
    return run(1, curve, folder / "qwen2_tied", Layout(), None)[0]


CURVE_BUDGETS = (None, 32, 56)


@pytest.mark.soak  # test_training_layouts.py has curves of a few layouts and budgets
@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "dp=2", "tp=2,dp=2", "tp=4", "dp=4"])
def test_curves_do_not_depend_on_layout_or_budget(
    folder: Path, curve_alone: torch.Tensor, layout: str
) -> None:
    """Loss and gradient norm of ten steps of fine-tuning in float32, step by step."""
    parsed = Layout.parse(layout)
    for found in run(parsed.num_ranks, curves, folder / "qwen2_tied", parsed, CURVE_BUDGETS):
        for budget, rows in zip(CURVE_BUDGETS, found, strict=True):
            error = float(((rows - curve_alone) / curve_alone).abs().max())
            assert error <= CURVE_FP32, f"{layout}, tokens_per_batch={budget}: {error:.2e}"
    assert curve_alone[-1, 0] < curve_alone[0, 0], "nothing was learned, so the curves say little"


def test_a_mean_of_means_does_depend_on_the_budget(folder: Path, curve_alone: torch.Tensor) -> None:
    """The mutation: the curves can tell a loss that is averaged in each micro-batch."""
    (found,) = run(1, wrong_curve, folder / "qwen2_tied")
    assert float(((found - curve_alone) / curve_alone).abs().max()) > CURVE_FP32


def wrong_curve(path: Path) -> torch.Tensor:
    return curve(path, Layout(), 32, wrong=True)
