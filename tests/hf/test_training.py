"""Training by either engine is the same training."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.weights.hf_directory import EngineName
from tests.helpers.families import TEXT
from tests.helpers.harness import run
from tests.helpers.layout_bodies import ragged
from tests.helpers.parity_configs import tiny_model
from tests.helpers.tolerances import CURVE_FP32

STEPS = 6


def curve(path: Path, engine: EngineName, layout: Layout, rate: float = 1e-3) -> Tensor:
    """[steps, 2]: loss and gradient norm of float32 fine-tuning on a fresh ragged batch a step."""
    options = EngineOptions(optim=OptimSettings(lr=rate), tokens_per_batch=56, engine=engine)
    model = from_pretrained(path, layout=layout, device="cpu", options=options)
    reports = [model.train_step(ragged(step), SFTLoss()) for step in range(STEPS)]
    return torch.tensor(
        [[report.loss, report.grad_norm] for report in reports], dtype=torch.float64
    )


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.soak), "qwen2_tied"])
def test_both_engines_learn_alike(name: str, tmp_path: Path) -> None:
    tiny_model(TEXT[name]()).save_pretrained(tmp_path)
    (expected,) = run(1, curve, tmp_path, "native", Layout())
    for found in run(2, curve, tmp_path, "transformers", Layout(cp=2)):
        assert float(((found - expected) / expected).abs().max()) <= CURVE_FP32
    (other,) = run(1, curve, tmp_path, "transformers", Layout(), 1.1e-3)
    assert float(((other - expected) / expected).abs().max()) > CURVE_FP32, (
        "the mutation: another rate shows"
    )
