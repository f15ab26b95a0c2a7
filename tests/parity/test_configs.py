"""The tiny models that parity tests rest on: readable, cuttable, written whole, and each option makes a difference."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dovetail.arch.registry import spec_from_config, validate_layout
from dovetail.parallel.layout import Layout
from tests.helpers.parity_configs import MAX_POSITIONS, WINDOW, save_tiny, tiny_configs, tiny_model

every_variant = pytest.mark.parametrize("name", sorted(tiny_configs()))


@every_variant
def test_written_checkpoints_are_read_and_can_be_cut(name: str, tmp_path: Path) -> None:
    model = save_tiny(tiny_configs()[name], tmp_path, torch.bfloat16)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    for tp in (1, 2, 4, 8):
        validate_layout(spec, Layout(tp=tp))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    written = model.state_dict()
    for key, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, written[key]), key
        assert tensor.numel() == 1 or tensor.std() > 0, f"{key} is trivial"


def test_no_config_is_shared() -> None:
    assert all(
        a is not b for a, b in zip(tiny_configs().values(), tiny_configs().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "plain", "length"),
    [
        ("llama_linear", "llama", 8),
        ("llama_llama3", "llama", 8),
        ("llama_yarn", "llama", 8),
        ("llama_dynamic", "llama", MAX_POSITIONS + 1),
        ("mistral_window", "mistral", WINDOW + 1),
        ("qwen3_window", "qwen3", WINDOW + 1),
    ],
)
def test_options_change_the_forward_pass(name: str, plain: str, length: int) -> None:
    """With the same weights; otherwise parity on the variant would prove nothing."""
    assert not torch.equal(
        logits(tiny_model(tiny_configs()[name]), length), logits(like(name, plain), length)
    )


@pytest.mark.parametrize(
    ("name", "plain"), [("llama_dynamic", "llama"), ("mistral_window", "mistral")]
)
def test_short_sequences_do_not_reach_the_option(name: str, plain: str) -> None:
    assert torch.equal(
        logits(tiny_model(tiny_configs()[name]), WINDOW), logits(like(name, plain), WINDOW)
    )


def like(name: str, plain: str) -> PreTrainedModel:
    """The plain variant with the weights of `name`."""
    model = tiny_model(tiny_configs()[plain])
    model.load_state_dict(tiny_model(tiny_configs()[name]).state_dict())
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    tokens = torch.arange(length)[None] % model.config.vocab_size
    scores: torch.Tensor = model(tokens).logits
    return scores


def test_value_models_have_one_label() -> None:
    model = tiny_model(tiny_configs()["qwen2"], values=True)
    assert model.state_dict()["score.weight"].shape == (1, 64)
