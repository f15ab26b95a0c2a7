"""What the transformers engine does not compute is refused by name, before any weight is read."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DistilBertConfig,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    JetMoeConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    NemotronConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from bench.models import one_rank
from dovetail.arch.transformers_spec import transformers_spec
from dovetail.errors import LayoutError, ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.factory.layouts import check_layout
from dovetail.hf.transformers_model import TransformersModel, make_model
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.transformers import TransformersSampler
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.families import TEXT, VISION, _make
from tests.helpers.parity_configs import tiny_model
from tests.helpers.program import here, refusal, write_rows

FULL = ["full_attention", "full_attention"]
QUANTIZED = {
    "text_config": {
        **VISION["kimi_k25"]().text_config.to_dict(),
        "quantization_config": {"quant_method": "fp8"},
    }
}
NEMOTRON = partial(NemotronHConfig, hidden_size=32, mamba_num_heads=4, mamba_head_dim=8, n_groups=2)
CHUNKED = ["chunked_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_make(Qwen3NextConfig), "linear_attention carry state over sequence boundaries"),
        (
            lambda: GPT2Config(n_layer=1, n_embd=16, n_head=2),
            "is not made of `model` and `lm_head` alone",
        ),
        (
            _make(Lfm2Config, layer_types=["conv", "full_attention"]),
            "layers of type conv carry state",
        ),
        (
            _make(Llama4TextConfig, attn_temperature_tuning=False, layer_types=CHUNKED),
            "layers of type chunked_attention",
        ),
        (
            _make(Llama4TextConfig, layer_types=FULL),
            "attn_temperature_tuning=True changes attention",
        ),
        (
            _make(GptOssConfig, num_local_experts=4, layer_types=FULL),
            "self_attn has sinks, which packed attention does",
        ),
        (
            _make(LlamaConfig, is_causal=False),
            "is_causal=False; tokens that see what follows them have no log-probs",
        ),
        (
            _make(Gemma3TextConfig, use_bidirectional_attention=True),
            "tokens see what follows them in .*layers.0.self_attn",
        ),
        (_make(JambaConfig), r"mamba.conv1d is a convolution over tokens"),
        (NEMOTRON, r"mixer.conv1d is a convolution over tokens, which carries state"),
        (
            lambda: VISION["kimi_k25"]().to_dict() | QUANTIZED,
            "config.json: quantization_config; convert",
        ),
        (DbrxConfig, "transformers makes no model of this config: "),
    ],
)
def test_options(config: Any, words: str) -> None:
    found: PreTrainedConfig | dict[str, Any] = config()
    with pytest.raises(ModelError, match=words):
        make_model(found if isinstance(found, dict) else found.to_dict())


@pytest.mark.parametrize("layers", [{"layers_block_type": ["mlp", "moe"]}, {"num_layers": 2}])
def test_families_that_name_their_depth_otherwise_are_not_refused_for_that(
    layers: dict[str, Any],
) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2}
    assert transformers_spec({"model_type": "nemotron_h", **sizes, **layers}).depth == 2


def test_tables_that_follow_the_longest_sequence() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    options = _make(LlamaConfig, rope_parameters=rope)().to_dict()
    with pytest.raises(
        ModelError, match="rope_type 'dynamic' follows the longest sequence of a batch"
    ):
        TransformersModel(transformers_spec(options), options, Mesh.solo(), KernelSet())


@pytest.mark.parametrize("sections", [[1, 1, 1], [2, 2], [1, 1, 2.0], 4])
def test_shares_of_rotated_channels_that_are_not_those_of_a_head(sections: Any) -> None:
    options = VISION["qwen2_vl"]().to_dict()
    options["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(
        ModelError,
        match=r"mrope_section is .*; expected three whole numbers that add up to 4, half of",
    ):
        make_model(options)
    with pytest.raises(ModelError, match="mrope_section is "):
        TransformersSampler(options, Mesh.solo(), torch.float32)


def test_a_family_that_recomputes_nothing() -> None:
    options = _make(JetMoeConfig, num_local_experts=4, num_experts_per_tok=2)().to_dict()
    with pytest.raises(
        ModelError, match="JetMoeForCausalLM recomputes nothing; set activation_checkpointing=none"
    ):
        TransformersModel(
            transformers_spec(options), options, Mesh.solo(), KernelSet(), recompute="full"
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text_config": None, "hidden_size": None}, "but its config has no hidden_size$"),
        ({"text_config": "sizes", "vocab_size": "9"}, "but its config has vocab_size '9'$"),
        (
            {"num_attention_heads": 0, "hidden_size": -1},
            "but its config has hidden_size -1, num_attention_heads 0$",
        ),
        ({"num_hidden_layers": 1 << 40}, "but its config has num_hidden_layers 1099511627776$"),
    ],
)
def test_sizes_that_are_none(given: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ModelError, match=words):
        transformers_spec({"model_type": "gemma", **sizes, **given})


def test_sizes_that_differ_by_layer_are_estimated() -> None:
    """As some families list them; transformers says what it makes of them."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {"intermediate_size": [16, 24], "num_key_value_heads": [1, 2]}
    plain = transformers_spec({"model_type": "gemma", "text_config": None, **sizes})
    assert transformers_spec({"model_type": "gemma", **sizes, **given}) == plain
    assert plain.layer_params == (4 * 8 * 8 + 3 * 8 * 32,) * 2


@pytest.mark.parametrize(
    ("layout", "words"),
    [("tp=2", "set tp=1, pp=1 and ep=1"), ("pp=2", "are cut by cp and dp alone")],
)
def test_layouts(layout: str, words: str, tmp_path: Path) -> None:
    TEXT["gemma3"]().save_pretrained(tmp_path)
    spec = Pretrained.open(tmp_path).spec
    with pytest.raises(LayoutError, match=words):
        check_layout(spec, Layout.parse(layout))


def test_a_degree_that_the_heads_do_not_allow_is_gathered_instead(tmp_path: Path) -> None:
    """Six heads over four ranks: two exchange heads, and two such groups gather keys and values."""
    config = TEXT["llama"]().to_dict() | {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_size": 48,
    }
    LlamaConfig(**config).save_pretrained(tmp_path)
    spec = Pretrained.open(tmp_path, "transformers").spec
    check_layout(spec, Layout(cp=4))
    with pytest.raises(
        LayoutError,
        match="heads can be exchanged over 1, 2 of cp=4 ranks; use cp_mode=auto or gather",
    ):
        check_layout(spec, Layout(cp=4, cp_mode="ulysses"))
    with pytest.raises(
        LayoutError,
        match="cp_mode='ulises' is not known; use one of auto, gather, ulysses, product",
    ):
        check_layout(spec, Layout(cp=4, cp_mode="ulises"))


def test_an_attention_function_that_needs_more_is_refused(tmp_path: Path) -> None:
    """Soft-capped scores come as an argument of the attention function."""
    config = _make(
        Gemma2Config, head_dim=8, final_logit_softcapping=None, attn_logit_softcapping=50.0
    )()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with one_rank(), pytest.raises(ModelError, match=r"attn_logit_softcapping=50\.0"):
        from_pretrained(tmp_path, device="cpu", options=EngineOptions(engine="transformers"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            _make(DogeConfig),
            "DogeAttention calls attention with attention_mask, which packed attention does not compute",
        ),
        (
            _make(DogeConfig, sliding_window=5),
            "the model changes its attention masks (dtype), which packed attention does",
        ),
        (_make(NemotronConfig), "NemotronAttention does not hand arguments on to attention"),
    ],
)
def test_what_only_the_call_of_attention_shows(config: Any, words: str, tmp_path: Path) -> None:
    """Masks of a model's own, and one that cannot be told where sequences begin."""
    tiny_model(config()).save_pretrained(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    assert words in refusal(
        here("score", "--model", tmp_path, "--data", data, "--out", tmp_path / "out.jsonl")
    )


def test_a_family_that_is_no_language_model_is_named_and_not_all_others() -> None:
    """transformers lists every class that it knows, behind a line break."""
    with pytest.raises(ModelError, match="DistilBertConfig") as raised:
        make_model(DistilBertConfig().to_dict())
    assert len(str(raised.value)) < 300
