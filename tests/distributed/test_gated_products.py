"""Products that gate inside, in whole engines: tensor parallel, data parallel, and where weight gradients wait."""

from pathlib import Path

import pytest
import torch

from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.mlp import GatedMLP
from dovetail.nn.products import Products
from dovetail.parallel.layout import Layout
from tests.helpers.families import TEXT
from tests.helpers.harness import run
from tests.helpers.parity_configs import tiny_model
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.probe import PROBE, gradients
from tests.helpers.quack_stand_in import everywhere, installed
from tests.helpers.tolerances import GRAD_RATIO_FP32, SUM_ORDER, worst_error, worst_ratio


def figures(folder: Path, layout: Layout) -> tuple[float, float, int]:
    """How far gradients are from those of plain products: error and stray factor; and how often products gated inside."""
    found = []
    with installed() as package:
        for gating in (False, True):
            options = EngineOptions(optim=PROBE, tokens_per_batch=80, recompute="selective")
            made = from_pretrained(
                folder, layout=layout, dtype=torch.float64, device="cpu", options=options
            )
            assert isinstance(made, Engine)
            for module in made.model.modules():
                if isinstance(module, GatedMLP) and gating:
                    module.gate_up_proj.products = Products(everywhere())
                    module.down_proj.products = Products(everywhere())
            made.train_step(make_batch(), objective)
            found.append(gradients(made)[0])
    return (
        worst_error(found[1], found[0])[0],
        worst_ratio(found[1], found[0])[0],
        package.calls["gate_up gradient"],
    )


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(dp=2), Layout(pp=2, schedule="zero_bubble")], ids=str
)
def test_gradients_are_those_of_plain_products(layout: Layout, tmp_path: Path) -> None:
    tiny_model(TEXT["qwen3"]()).save_pretrained(tmp_path)
    for error, stray, calls in run(layout.num_ranks, figures, tmp_path, layout):
        assert error <= SUM_ORDER
        assert stray <= GRAD_RATIO_FP32
        assert calls > 1
