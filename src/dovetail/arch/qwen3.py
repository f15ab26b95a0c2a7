"""Qwen3 (dense): explicit head_dim, RMSNorm on the heads of q and k, `attention_bias` on all four projections."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import dense_spec, family_fields, qwen_windows
from dovetail.arch.spec import ArchSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen3_spec(config: Mapping[str, Any]) -> ArchSpec:
    """The spec of a raw config.json with model_type qwen3."""
    c = family_fields("qwen3", config, DEFAULTS)
    bias = c.flag("attention_bias")
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=bias, o_bias=bias, qk_norm=True)
