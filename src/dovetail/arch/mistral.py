"""Mistral: Llama's shape without biases, and one sliding window for all layers (null: none)."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import dense_spec, family_fields, layer_windows
from dovetail.arch.spec import ArchSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def mistral_spec(config: Mapping[str, Any]) -> ArchSpec:
    """The spec of a raw config.json with model_type mistral."""
    c = family_fields("mistral", config, DEFAULTS)
    window = None if c.get("sliding_window") is None else c.integer("sliding_window")
    return dense_spec(c, windows=layer_windows(c, window, per_layer=False))
