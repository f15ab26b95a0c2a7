"""Apertus: QK-norm, an ungated MLP with xIELU, its own names of norms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.arch.common import BASE, Config, dense_spec, family_fields, layer_windows
from dovetail.arch.spec import ArchSpec

THETA = 12000000.0
ROPE: Mapping[str, Any] = {
    "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0,
    "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    **BASE, "vocab_size": 131072, "hidden_act": "xielu", "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5, "pad_token_id": 3,
}  # fmt: skip


def apertus_spec(config: Config) -> ArchSpec:
    given = config.get("rope_parameters")  # an empty set means no scaling
    if given is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": ROPE}
    c = family_fields("apertus", {"rope_theta": THETA, **config}, DEFAULTS)
    bias = c.flag("attention_bias")
    windows = layer_windows(c, used=False, per_layer=False)
    biases = {"qkv_bias": bias, "o_bias": bias}
    spec = dense_spec(c, windows=windows, **biases, qk_norm=True, activations=("xielu",))
    norm_names = ("attention_layernorm", "feedforward_layernorm")
    return replace(spec, activation="xielu", norm_names=norm_names)
