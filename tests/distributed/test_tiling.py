"""MLPs by tiles in whole engines: numbers of tiles may differ over replicas, and tp and FSDP keep step."""

from pathlib import Path
from typing import Literal

import pytest
from transformers import Qwen3MoeConfig

from dovetail.errors import ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.parallel.layout import Layout
from tests.helpers.families import TEXT
from tests.helpers.harness import run
from tests.helpers.parity_configs import EXPERTS, tiny, tiny_model
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import GRAD_RATIO_FP32, MODEL_FP32, worst_error, worst_ratio

TILE = 6
Engine = Literal["native", "transformers"]


def figures(
    folder: Path, layout: Layout, engine: Engine, recompute: Literal["none", "full"]
) -> tuple[float, float]:
    """How far gradients with tiles are from those without: error, and stray factor."""
    found = []
    for tile in (0, TILE):
        options = EngineOptions(
            optim=PROBE,
            tokens_per_batch=80,
            engine=engine,
            recompute=recompute,
            mlp_tile_tokens=tile,
        )
        made = from_pretrained(folder, layout=layout, device="cpu", options=options)
        made.train_step(make_batch(), objective)
        found.append(gradients(made)[0])
    return worst_error(found[1], found[0])[0], worst_ratio(found[1], found[0])[0]


@pytest.mark.parametrize(
    ("name", "layout", "engine", "recompute"),
    [
        ("llama", Layout(tp=2), "native", "none"),
        ("apertus", Layout(dp=2), "native", "full"),
        ("llama", Layout(pp=2, schedule="zero_bubble"), "native", "none"),
        ("gemma3", Layout(cp=2), "transformers", "full"),
        pytest.param("llama", Layout(tp=2, cp=2), "native", "full", marks=pytest.mark.soak),
        pytest.param("apertus", Layout(cp=2, dp=2), "transformers", "none", marks=pytest.mark.soak),
    ],
)
def test_edge_case_45(
    name: str, layout: Layout, engine: Engine, recompute: Literal["none", "full"], tmp_path: Path
) -> None:
    tiny_model(TEXT[name]()).save_pretrained(tmp_path)
    for error, stray in run(layout.num_ranks, figures, tmp_path, layout, engine, recompute):
        assert error <= MODEL_FP32
        assert stray <= GRAD_RATIO_FP32


def refused(folder: Path) -> str:
    """Why a model whose layers all have experts has no tiles."""
    with pytest.raises(ModelError) as caught:
        from_pretrained(
            folder, layout=Layout(pp=2), device="cpu", options=EngineOptions(mlp_tile_tokens=TILE)
        )
    return str(caught.value)


def test_a_stage_may_have_no_dense_mlp(tmp_path: Path) -> None:
    """One rank alone refused, and the others waited for it: of two stages the first has the dense layer, if any has."""
    for name, dense in (("some", [0]), ("none", [])):
        config = tiny(
            Qwen3MoeConfig, **EXPERTS, head_dim=16, mlp_only_layers=dense, num_hidden_layers=2
        )
        tiny_model(config).save_pretrained(tmp_path / name)
    for error, stray in run(
        2, figures, tmp_path / "some", Layout(pp=2), "native", "none", timeout=60
    ):
        assert error <= MODEL_FP32
        assert stray <= GRAD_RATIO_FP32
    assert all(
        "no MLP of up_proj and down_proj alone" in told
        for told in run(2, refused, tmp_path / "none")
    )
