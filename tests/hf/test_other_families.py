"""Families that nobody here has chosen: those that the transformers engine accepts, made small, equal transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from bench.models import one_rank
from dovetail.batch.packed import PackedBatch
from dovetail.factory.engine import from_pretrained
from dovetail.hf.transformers_model import make_model
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.hf_parity import as_stored, check, figures
from tests.helpers.parity_configs import tiny_model
from tests.helpers.parity_reference import LENGTHS, write_outputs
from tests.helpers.small_models import SIZES, small
from tests.helpers.tolerances import MODEL_FP32, max_abs

FAMILIES = (
    *(
        "afmoe",
        "arcee",
        "aria_text",
        "axk1",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
    ),
    *(
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma3_text",
        "glm",
    ),
    *(
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "hunyuan_v1_dense",
    ),
    *(
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jetmoe",
        "kolibri1",
        "laguna",
        "longcat_flash",
        "mellum",
    ),
    *(
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "phimoe",
    ),
    *("qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "youtu"),
)
# A bias that is not trained, names that transformers changes, with experts apart, too, and norms of all heads.
QUICK = ("ernie4_5_moe", "granitemoe", "phimoe", "olmo3")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in FAMILIES],
)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    config = small(family)
    make_model(config.to_dict())
    model = tiny_model(config)
    model.save_pretrained(tmp_path / "model")
    write_outputs(model, tmp_path)
    as_stored(model, tmp_path)
    ways: tuple[Recompute, ...] = (
        ("none", "full") if model.supports_gradient_checkpointing else ("none",)
    )
    for recompute in ways:
        for found in run(1, figures, str(tmp_path), Layout(), recompute):
            check(found)


@pytest.mark.parametrize(
    "family", ["phi3", pytest.param("minicpm3", marks=pytest.mark.soak), "phimoe"]
)
def test_tables_of_longrope_follow_each_sequence(family: str, tmp_path: Path) -> None:
    """In one batch lie sequences on both sides of the original length."""
    config = small(family).to_dict()
    count = (
        config.get("qk_rope_head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    )
    factors = {
        "short_factor": [1.0 + i / 9 for i in range(count)],
        "long_factor": [2.0 + i / 3 for i in range(count)],
    }
    mscale = {"short_mscale": 1.1, "long_mscale": 1.3} if family == "phimoe" else {}
    rope = {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": LENGTHS[0],
        **factors,
        **mscale,
    }
    lengths = {"original_max_position_embeddings": LENGTHS[0]} if family == "phi3" else {}
    model = tiny_model(AutoConfig.for_model(**{**config, **lengths, "rope_parameters": rope}))
    model.save_pretrained(tmp_path / "model")
    write_outputs(model, tmp_path)
    as_stored(model, tmp_path)
    for found in run(2, figures, str(tmp_path), Layout(cp=2), "full"):
        check(found)


def test_one_sequence_alone(tmp_path: Path) -> None:
    """Its attention is computed as it lies, and Afmoe views what comes back."""
    if "afmoe" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no afmoe")
    model = tiny_model(small("afmoe"))
    model.save_pretrained(tmp_path)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18, 19, 20]]
    with one_rank():
        engine = from_pretrained(tmp_path, device="cpu")
        scored = [engine.score(PackedBatch.pack(batch)).logprob for batch in (rows[:1], rows)]
    for batch, logprob in zip((rows[:1], rows), scored, strict=True):
        found = logprob.unflatten(0, (-1, 8))[:, :-1]
        with torch.no_grad():
            logp = model(torch.tensor(batch)).logits[:, :-1].log_softmax(-1)
        expected = logp.gather(2, torch.tensor(batch)[:, 1:, None])[..., 0]
        assert max_abs((found - expected) / expected.abs().clamp(min=1.0)) <= MODEL_FP32


def test_mistral_with_types_of_layers_is_ministral(tmp_path: Path) -> None:
    """So transformers reads a config.json, and its own Mistral has one window for all layers."""
    if "ministral" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no ministral")
    config = small("ministral").to_dict() | {
        "layer_types": ["sliding_attention", "full_attention"] * 2
    }
    model = tiny_model(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mistral"}))
    assert AutoConfig.from_pretrained(tmp_path / "model").model_type == "ministral"
    write_outputs(model, tmp_path)
    for found in run(2, figures, str(tmp_path), Layout(cp=2)):
        check(found)


def test_floats_that_json_has_no_words_for(tmp_path: Path) -> None:
    """Granite's hybrids say of their other layers that a time step has no end; all layers of some are attention."""
    if "granitemoehybrid" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no granitemoehybrid")
    sizes = {
        name: SIZES[name]
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    }
    shape = {
        "mamba_n_heads": 4,
        "num_local_experts": 4,
        "shared_intermediate_size": 24,
        "intermediate_size": 24,
    }
    kind = CONFIG_MAPPING["granitemoehybrid"]
    model = tiny_model(
        kind(**sizes, **shape, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    )
    model.save_pretrained(tmp_path / "model")
    assert "__float__" in (tmp_path / "model/config.json").read_text()
    write_outputs(model, tmp_path)
    as_stored(model, tmp_path)
    for found in run(2, figures, str(tmp_path), Layout(cp=2)):
        check(found)
