"""Mistral: Llama's shape without biases, and one sliding window for all layers (null: none)."""

from dovetail.arch.common import BASE, Config, dense_spec, family_fields, layer_windows
from dovetail.arch.spec import ArchSpec


def mistral_spec(config: Config) -> ArchSpec:
    c = family_fields(
        "mistral", config, BASE, num_key_value_heads=8, max_position_embeddings=4096 * 32, sliding_window=4096
    )
    return dense_spec(c, windows=layer_windows(c, per_layer=False))
