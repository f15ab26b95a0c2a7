"""Options of known families that the native engine does not compute: auto takes the transformers engine, and says so."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    LlamaConfig,
    MinistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from bench.models import one_rank
from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.errors import LayoutError, ModelError
from dovetail.factory.engine import from_pretrained
from dovetail.factory.layouts import check_layout
from dovetail.factory.sampler import backend_layout
from dovetail.parallel.layout import Layout
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.parity_configs import VOCAB, WINDOW, latent, tiny, tiny_model
from tests.helpers.program import here, make_model, read_rows, write_recipe, write_rows
from tests.helpers.tolerances import MODEL_FP32

MIXED = ["sliding_attention", "full_attention"]
OPTIONS: Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "hidden_act is 'gelu'": (LlamaConfig, {"hidden_act": "gelu"}),
    "attention_dropout is 0.1": (Qwen3Config, {"head_dim": 16, "attention_dropout": 0.1}),
    "router_jitter_noise is 0.2": (
        MixtralConfig,
        {"num_local_experts": 4, "router_jitter_noise": 0.2},
    ),
    "norm_topk_prob is True": (DeepseekV2Config, {**latent(), "norm_topk_prob": True}),
    f"layer_types is {MIXED}": (
        MinistralConfig,
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
}
ROWS = [{"input_ids": [(7 * i) % VOCAB for i in range(start, start + 20)]} for start in (1, 5)]


def save(what: str, path: Path) -> PreTrainedModel:
    kind, options = OPTIONS[what]
    model = tiny_model(tiny(kind, **options))
    model.save_pretrained(path)
    if kind is MinistralConfig:  # as transformers reads a Mistral that has types of layers
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mistral"}))
    return model


@pytest.mark.parametrize("what", OPTIONS)
def test_scores_equal_transformers(what: str, tmp_path: Path) -> None:
    model = save(what, tmp_path / "model")
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    ended = here("score", "--model", tmp_path / "model", "--data", data, "--out", out)
    assert ended.code == 0, ended.err
    assert len(ended.err.splitlines()) == 1
    assert f"{what}; supported: " in ended.err and "(--engine transformers)" in ended.err
    for row, found in zip(ROWS, read_rows(out), strict=True):
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            log_probs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = log_probs.gather(1, ids[1:, None])[:, 0].tolist()
        assert all(
            math.isclose(a, b, rel_tol=MODEL_FP32, abs_tol=MODEL_FP32)
            for a, b in zip(found["log_probs"], expected, strict=True)
        )


@pytest.mark.parametrize("what", OPTIONS)
def test_layouts_that_transformers_does_not_cut_by(what: str, tmp_path: Path) -> None:
    save(what, tmp_path)
    source = Pretrained.open(tmp_path)
    assert isinstance(source.spec, TransformersSpec)
    assert check_layout(source.spec, Layout(cp=2, dp=2)) == Layout(cp=2, dp=2)
    for layout in (Layout(tp=2), Layout(pp=2), Layout(dp=2, ep=2)):
        with pytest.raises(LayoutError) as raised:
            check_layout(source.spec, layout)
        assert f"{what}; supported: " in str(raised.value)
        assert (
            "--engine transformers may run it, but cuts by cp and dp alone; set tp=1, pp=1 and ep=1"
            in str(raised.value)
        )
        with pytest.raises(LayoutError, match="--engine transformers may run it"):
            backend_layout(source, layout, "transformers")
    with pytest.raises(
        ModelError, match=r"supported: .*; rollout.backend=transformers may sample it"
    ):
        backend_layout(source, Layout(), "native")
    with pytest.raises(
        ModelError, match=r"supported: .*; --engine transformers may run it, cut by cp and dp alone"
    ):
        Pretrained.open(tmp_path, "native")


def test_commands_and_library_say_so(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_act="gelu")
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "2+2=", "completion": "4"}] * 2)
    told = "hidden_act is 'gelu'; supported: silu; so the transformers engine runs this model (--engine transformers)"
    with (
        pytest.warns(UserWarning, match="hidden_act is 'gelu'.* so the transformers engine runs"),
        one_rank(),
    ):
        assert isinstance(from_pretrained(model, device="cpu").model.spec, TransformersSpec)
    arguments = [
        "generate",
        "--model",
        model,
        "--data",
        data,
        "--out",
        tmp_path / "out.jsonl",
        "--max-new-tokens",
        2,
    ]
    ended = here(*arguments)
    assert ended.code == 0 and told in ended.err
    recipe = write_recipe(tmp_path / "recipe.yaml", model, data)
    ended = here("train", recipe)
    assert ended.code == 0 and told in ended.out.replace("\n", " "), ended


def test_what_transformers_does_not_make_either(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "snake"}))
    with (
        one_rank(),
        pytest.raises(
            ModelError, match="hidden_act is 'snake'; supported: silu; the transformers engine"
        ),
    ):
        from_pretrained(model, device="cpu")
