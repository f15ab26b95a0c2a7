"""The transformers engine equals plain transformers: log-probs, entropies, values and every gradient, packed and shared."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    OlmoConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Starcoder2Config,
)

from bench.models import one_rank
from dovetail.arch.transformers_spec import transformers_spec
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.hf.transformers_model import TransformersModel
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from tests.helpers.families import TEXT, _make
from tests.helpers.harness import run
from tests.helpers.hf_parity import as_stored, check, figures
from tests.helpers.parity_configs import tiny, tiny_model
from tests.helpers.parity_reference import (
    make_batch,
    objective,
    read_reference,
    write_outputs,
)
from tests.helpers.tolerances import (
    MODEL_FP32,
    STEP_BF16,
    max_abs,
)

ODD = {"intermediate_size": 21, "num_experts": 4, "num_experts_per_tok": 2}
NOISY = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.5}
FOUR = ("gemma3-lm", "qwen3-value")  # on four ranks: windows, and a critic


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family as a language model and, where transformers has its token classifier, as a critic."""
    folders = {}
    for name, make in TEXT.items():
        for values in (False, True) if name != "gemma3" else (False,):
            folder = tmp_path_factory.mktemp(f"{name}_{'value' if values else 'lm'}")
            model = tiny_model(make(), values=values)
            model.save_pretrained(folder / "model")
            folders[f"{name}-{'value' if values else 'lm'}"] = write_outputs(model, folder)
    return folders


@pytest.mark.parametrize(
    "layout",
    [
        "dp=1",
        "cp=2",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("cp=2,dp=2", "cp=4", "cp=8")),
    ],
)
def test_every_family_equals_transformers(references: dict[str, Path], layout: str) -> None:
    """Policies on one rank, critics over cp; of gemma3 there is no critic."""
    parsed = Layout.parse(layout)
    for name, folder in references.items():
        quick = layout in ("dp=1", "cp=2")
        if (
            not quick
            or name == "gemma3-lm"
            or name.endswith({"dp=1": "-lm", "cp=2": "-value"}[layout])
        ):
            for found in run(parsed.num_ranks, figures, str(folder), parsed):
                check(found)


@pytest.mark.soak  # test_edge_cases.py has images over such ranks
def test_ranks_to_a_sequence_and_replicas(references: dict[str, Path]) -> None:
    for name in FOUR:
        for found in run(4, figures, str(references[name]), Layout(cp=2, dp=2)):
            check(found)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gemma3-lm", "product"),
        ("qwen3-value", "gather"),
        *(pytest.param("gemma3-lm", mode, marks=pytest.mark.soak) for mode in ("auto", "gather")),
        *(
            pytest.param("qwen3-value", mode, marks=pytest.mark.soak)
            for mode in ("auto", "product")
        ),
    ],
)
def test_four_ranks_to_a_sequence_in_every_mode(
    references: dict[str, Path], name: str, mode: str
) -> None:
    for found in run(4, figures, str(references[name]), Layout(cp=4, cp_mode=mode)):
        check(found)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_changes_nothing(references: dict[str, Path], recompute: Recompute) -> None:
    for name in ("gemma3-lm", "apertus-lm"):
        for found in run(2, figures, str(references[name]), Layout(cp=2), recompute):
            check(found)


@pytest.mark.parametrize(
    "make",
    [
        _make(Starcoder2Config, residual_dropout=0.2, embedding_dropout=0.2),
        _make(MixtralConfig, **NOISY),
    ],
)
def test_recomputing_lets_no_noise_of_training_in(
    make: Callable[[], PreTrainedConfig], tmp_path: Path
) -> None:
    """Dropout that is not a module, and a router that is shaken: blocks are in training mode, nothing in them is."""
    model = tiny_model(make())
    model.save_pretrained(tmp_path / "model")
    write_outputs(model, tmp_path)
    as_stored(model, tmp_path)
    for found in run(1, figures, str(tmp_path), Layout(), "full"):
        check(found)


def test_products_that_are_clipped_where_they_lie(tmp_path: Path) -> None:
    """As OLMo's queries, keys and values: the level that keeps products computes them again."""
    model = tiny_model(tiny(OlmoConfig, clip_qkv=0.3))
    model.save_pretrained(tmp_path / "model")
    write_outputs(model, tmp_path)
    for found in run(1, figures, str(tmp_path), Layout(), "light"):
        check(found)


def test_experts_of_any_width(tmp_path: Path) -> None:
    """torch's grouped products want rows of 16 bytes, on which plain transformers insists."""
    model = tiny_model(tiny(OlmoeConfig, **ODD))
    model.save_pretrained(tmp_path / "model")
    model.set_experts_implementation("eager")
    write_outputs(model, tmp_path)
    for found in run(2, figures, str(tmp_path), Layout(cp=2), "full"):
        check(found)
    with one_rank():
        engine = from_pretrained(tmp_path / "model", dtype=torch.bfloat16, device="cpu")
        loss = engine.train_step(make_batch(), objective).loss
    expected = float(read_reference(tmp_path)[0]["loss"])
    assert abs(loss - expected) <= STEP_BF16 * (1 + abs(expected))


def test_recomputing_warns_of_nothing() -> None:
    config = TEXT["llama"]().to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TransformersModel(
            transformers_spec(config), config, Mesh.solo(), KernelSet(), recompute="full"
        )


def test_a_mutation_is_noticed(references: dict[str, Path]) -> None:
    """Another model's weights are not this model's."""
    (found,) = run(1, mixed_up, str(references["llama-lm"]))
    assert found > 100 * MODEL_FP32


def mixed_up(folder: str) -> float:
    outputs, _ = read_reference(Path(folder))
    engine = from_pretrained(
        Path(folder) / "model", device="cpu", options=EngineOptions(engine="transformers")
    )
    with torch.no_grad():
        for shard in engine.optimizer.shards:
            if shard.name == "model.layers.1.mlp.down_proj.weight":
                shard.local.mul_(1.01)
    return max_abs(engine.score(make_batch()).logprob - outputs["logprob"])
