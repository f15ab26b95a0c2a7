"""Qwen2 and Qwen2.5: biases on q, k and v only, and optional sliding windows from `max_window_layers` on."""

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
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen2_spec(config: Mapping[str, Any]) -> ArchSpec:
    """The spec of a raw config.json with model_type qwen2."""
    c = family_fields("qwen2", config, DEFAULTS)
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=True)
