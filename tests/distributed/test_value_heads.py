"""Value heads under every name that they have in the wild: read, computed, saved, and read again here and elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from dovetail.arch.registry import FAMILIES
from dovetail.errors import CheckpointError, ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.parallel.layout import Layout
from dovetail.weights.hf_directory import saved_config
from tests.helpers.harness import run
from tests.helpers.parity_configs import save_tiny, tiny_configs, tiny_model
from tests.helpers.parity_reference import make_batch, rows_of
from tests.helpers.tolerances import EXACT, MODEL_FP32, max_abs

STEMS = (
    "score",
    "v_head.summary",
    "v_head",
    "value_head.summary",
    "value_head",
    "classifier",
    "lm_head",
)
CASES = {
    f"{stem}, {kind}": (stem, kind == "bias") for stem in STEMS for kind in ("bias", "no bias")
}
REWARD = "score, no bias"  # a sequence classifier: it has no bias, and keeps having none
FEW = (REWARD, *(f"{stem}, {('bias', 'no bias')[i % 2]}" for i, stem in enumerate(STEMS)))


def write_case(path: Path, stem: str, bias: bool, variant: str = "llama_tied") -> dict[str, Tensor]:
    """A checkpoint with a value head called `stem`, and what other programs leave beside it; its tensors."""
    model = tiny_model(tiny_configs()[variant], values=True)
    model.save_pretrained(path)
    tensors = dict(model.state_dict())
    head = {kind: tensors.pop(f"score.{kind}") for kind in ("weight", "bias")}
    tensors |= {f"{stem}.{kind}": x for kind, x in head.items() if kind == "weight" or bias}
    if stem.startswith("v"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(
        {name: x.contiguous() for name, x in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((path / "config.json").read_text())
    kind = "ForSequenceClassification" if stem == "score" and not bias else "ForCausalLM"
    config["architectures"] = [config["architectures"][0].replace("ForTokenClassification", kind)]
    config["pad_token_id"] = 0
    (path / "config.json").write_text(json.dumps(config))
    return tensors


@torch.no_grad()
def defined(path: Path, tensors: Mapping[str, Tensor], stem: str) -> Tensor:
    """Values [T] from transformers' bare trunk and the head's two tensors."""
    config = AutoConfig.from_pretrained(path)
    trunk = AutoModel.from_config(config, attn_implementation="eager").eval()
    trunk.load_state_dict(
        {k.removeprefix("model."): x for k, x in tensors.items() if k.startswith("model.")}
    )
    hidden = torch.cat([trunk(row[None]).last_hidden_state[0] for row in rows_of(make_batch())])
    return hidden @ tensors[f"{stem}.weight"][0] + tensors.get(f"{stem}.bias", torch.zeros(1))


def valued(
    folder: Path, out: Path, layout: Layout, fresh: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """For every case its values, and those of what was saved and loaded again."""
    found = {}
    for path in sorted(folder.iterdir()):
        options = EngineOptions(fresh_head_seed=fresh)
        engine = from_pretrained(path, layout=layout, head="value", device="cpu", options=options)
        engine.save_pretrained(out / path.name)
        again = from_pretrained(out / path.name, layout=layout, head="value", device="cpu")
        found[path.name] = engine.values(make_batch()), again.values(make_batch())
    return found


@torch.no_grad()
def transformed(kind: Any, path: Path) -> list[Tensor]:
    """The logits of each sequence of the batch, by transformers; nothing missing or left over."""
    model, info = kind.from_pretrained(path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    return [model.eval()(row[None]).logits[0] for row in rows_of(make_batch())]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(tp=2), FEW),
        *(
            pytest.param(x, (*CASES,), marks=pytest.mark.soak)
            for x in (Layout(), Layout(tp=2), Layout(tp=2, dp=2))
        ),
    ],
    ids=str,
)
def test_heads_of_every_name_come_and_go(
    tmp_path: Path, layout: Layout, names: tuple[str, ...]
) -> None:
    tensors = {name: write_case(tmp_path / "in" / name, *CASES[name]) for name in names}
    for found in run(layout.num_ranks, valued, tmp_path / "in", tmp_path / "out", layout):
        for name in names:
            stem, _ = CASES[name]
            expected = defined(tmp_path / "in" / name, tensors[name], stem)
            first, again = found[name]
            assert max_abs((first - expected) / expected.abs().clamp(min=1.0)) <= MODEL_FP32, name
            assert max_abs(first - again) == EXACT, name
            wrong = {**tensors[name], f"{stem}.weight": 1.01 * tensors[name][f"{stem}.weight"]}
            assert max_abs(first - defined(tmp_path / "in" / name, wrong, stem)) > MODEL_FP32, name
    for name in names:
        values = found[name][0]
        if name == REWARD:
            theirs = torch.cat(
                transformed(AutoModelForSequenceClassification, tmp_path / "out" / name)
            )
            last = make_batch().cu_seqlens[1:].long() - 1
            values = values[last]
        else:
            theirs = torch.cat(
                transformed(AutoModelForTokenClassification, tmp_path / "out" / name)
            )[:, 0]
        assert max_abs((values - theirs) / theirs.abs().clamp(min=1.0)) <= MODEL_FP32, name


def test_a_fresh_head_is_the_same_on_every_layout_and_says_when_it_is_not_allowed(
    tmp_path: Path,
) -> None:
    """A causal language model with tied embeddings: the head is its own, and drawn from the seed alone."""
    save_tiny(tiny_configs()["qwen2_tied"], tmp_path / "in" / "model")
    layouts = (Layout(), Layout(tp=2), Layout(dp=3))
    found = {
        str(a): run(a.num_ranks, valued, tmp_path / "in", tmp_path / str(a), a, fresh=5)[0]["model"]
        for a in layouts
    }
    alone = found[str(Layout())][0]
    assert max_abs(alone) > 0.0
    for first, again in found.values():
        assert max_abs((first - alone) / alone.abs().clamp(min=1.0)) <= MODEL_FP32
        assert max_abs(first - again) == EXACT
    (other,) = run(1, valued, tmp_path / "in", tmp_path / "other", Layout(), fresh=6)
    assert max_abs(other["model"][0] - alone) > MODEL_FP32
    theirs = torch.cat(
        transformed(AutoModelForTokenClassification, tmp_path / str(Layout(tp=2)) / "model")
    )[:, 0]
    assert max_abs((theirs - alone) / theirs.abs().clamp(min=1.0)) <= MODEL_FP32
    assert run(
        2,
        refused,
        tmp_path / "in" / "model",
        ModelError,
        "has no value head: expected one of score.weight",
    ) == [1, 1]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
def test_a_score_without_bias_is_saved_as_a_sequence_classifier(architecture: str) -> None:
    given = {"model_type": "llama", "architectures": [architecture], "pad_token_id": 0}
    saved = saved_config(given, "value_without_bias", None)
    assert saved["architectures"] == ["LlamaForSequenceClassification"]
    assert (saved == given) == (architecture == "LlamaForSequenceClassification")
    assert saved.get("num_labels", 1) == 1


@pytest.mark.parametrize("family", sorted(name for name in FAMILIES if name in CONFIG_MAPPING))
def test_a_config_without_architectures_gets_those_that_transformers_has(family: str) -> None:
    name = CONFIG_MAPPING[family]().__class__.__name__.removesuffix("Config")
    assert saved_config({"model_type": family}, "value", None)["architectures"] == [
        f"{name}ForTokenClassification"
    ]


def test_a_head_of_another_shape_is_refused_on_every_rank(tmp_path: Path) -> None:
    model = tiny_model(tiny_configs()["llama"], values=True)
    model.save_pretrained(tmp_path)
    tensors = {
        **model.state_dict(),
        "score.weight": torch.zeros(2, 64),
        "score.bias": torch.zeros(2),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert run(2, refused, tmp_path, CheckpointError, "score.weight") == [1, 1]


def refused(path: Path, kind: type[Exception], message: str) -> int:
    with pytest.raises(kind, match=message):
        from_pretrained(path, layout=Layout(tp=2), head="value", device="cpu")
    return 1


def test_a_trained_value_model_keeps_its_trunk_in_the_source_dtype(tmp_path: Path) -> None:
    """bfloat16 in, bfloat16 out, the head too; the language model's head does not leave with a critic."""
    save_tiny(tiny_configs()["llama"], tmp_path / "in" / "model", torch.bfloat16)
    run(2, valued, tmp_path / "in", tmp_path / "out", Layout(tp=2), fresh=1)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "out" / "model")
    assert {x.dtype for x in model.state_dict().values()} == {torch.bfloat16}
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "in" / "model").state_dict()
    for name, x in model.state_dict().items():
        assert name.startswith("score.") or torch.equal(x, source[name]), name
