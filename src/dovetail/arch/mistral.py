"""Mistral: Llama's shape without biases, and one sliding window for all layers (null: none)."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import BASE, dense_spec, family_fields, layer_windows
from dovetail.arch.spec import ArchSpec

DEFAULTS: Mapping[str, Any] = {
    **BASE,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
}


def mistral_spec(config: Mapping[str, Any]) -> ArchSpec:
    c = family_fields("mistral", config, DEFAULTS)
    window = None if c.get("sliding_window") is None else c.integer("sliding_window")
    return dense_spec(c, windows=layer_windows(c, window, per_layer=False))
