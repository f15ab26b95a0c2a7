"""What the transformers engine does not compute is refused by name, before any weight is read."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from dovetail.build.engine import EngineOptions, check_layout, from_pretrained
from dovetail.errors import LayoutError, ModelError
from dovetail.hf.model import make_model
from dovetail.layout import Layout
from dovetail.weights.pretrained import Pretrained
from tests.hf.families import TEXT, _make


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_make(Qwen3NextConfig), "linear_attention carry state over sequence boundaries"),
        (
            _make(LlamaConfig, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type 'dynamic' follows the longest sequence of a batch",
        ),
        (lambda: GPT2Config(n_layer=1, n_embd=16, n_head=2), "is not made of `model` and `lm_head` alone"),
    ],
)
def test_options(config: Any, words: str) -> None:
    found: PreTrainedConfig = config()
    with pytest.raises(ModelError, match=words):
        make_model(found.to_dict())


@pytest.mark.parametrize(
    ("layout", "words"), [("tp=2", "set tp=1, pp=1 and ep=1"), ("pp=2", "are cut by cp and dp alone")]
)
def test_layouts(layout: str, words: str, tmp_path: Path) -> None:
    TEXT["gemma3"]().save_pretrained(tmp_path)
    spec = Pretrained.open(tmp_path).spec
    with pytest.raises(LayoutError, match=words):
        check_layout(spec, Layout.parse(layout))


def test_a_degree_that_the_heads_do_not_allow_is_gathered_instead(tmp_path: Path) -> None:
    """Six heads over four ranks: two exchange heads, and two such groups gather keys and values."""
    config = TEXT["llama"]().to_dict() | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    LlamaConfig(**config).save_pretrained(tmp_path)
    spec = Pretrained.open(tmp_path, "transformers").spec
    check_layout(spec, Layout(cp=4))
    with pytest.raises(LayoutError, match="heads can be exchanged over 1, 2 of cp=4 ranks; use cp_mode=auto or gather"):
        check_layout(spec, Layout(cp=4, cp_mode="ulysses"))


def test_an_attention_function_that_needs_more_is_refused(tmp_path: Path) -> None:
    """Soft-capped scores come as an argument of the attention function."""
    config = _make(Gemma2Config, head_dim=8, final_logit_softcapping=None, attn_logit_softcapping=50.0)()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"attn_logit_softcapping=50\.0"):
        from_pretrained(tmp_path, device="cpu", options=EngineOptions(engine="transformers"))
