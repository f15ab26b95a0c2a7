"""Llama 2 and 3.x: no window; `attention_bias` covers all four projections, `mlp_bias` all three."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import dense_spec, family_fields, layer_windows
from dovetail.arch.spec import ArchSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def llama_spec(config: Mapping[str, Any]) -> ArchSpec:
    """The spec of a raw config.json with model_type llama."""
    c = family_fields("llama", config, DEFAULTS)
    if c.get("sliding_window") is not None:
        raise c.refusal("sliding_window", "null; a windowed model of this shape has model_type mistral")
    bias = c.flag("attention_bias")
    windows = layer_windows(c, None, per_layer=False)
    return dense_spec(c, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=c.flag("mlp_bias"))
