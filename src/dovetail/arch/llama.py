"""Llama, Mistral (one sliding window), Mixtral (experts in every layer)."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import (
    BASE,
    Config,
    dense_spec,
    family_fields,
    layer_windows,
    renamed,
    with_experts,
)
from dovetail.arch.spec import ArchSpec, MoeSpec

LLAMA: Mapping[str, Any] = {
    **BASE, "intermediate_size": 11008, "max_position_embeddings": 2048, "mlp_bias": False,
}  # fmt: skip
MISTRAL: Mapping[str, Any] = {
    **BASE, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096,
}  # fmt: skip
MIXTRAL: Mapping[str, Any] = {
    **MISTRAL, "rms_norm_eps": 1e-5, "sliding_window": None,
    "num_experts_per_tok": 2, "num_local_experts": 8, "router_jitter_noise": 0.0,
}  # fmt: skip


def llama_spec(config: Config) -> ArchSpec:
    c = family_fields("llama", config, LLAMA)
    if c.get("sliding_window") is not None:
        supported = "null; a windowed model of this shape has model_type mistral"
        raise c.refusal("sliding_window", supported)
    bias = c.flag("attention_bias")
    windows = layer_windows(c, used=False, per_layer=False)
    return dense_spec(c, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=c.flag("mlp_bias"))


def mistral_spec(config: Config) -> ArchSpec:
    c = family_fields("mistral", config, MISTRAL)
    return dense_spec(c, windows=layer_windows(c, per_layer=False))


def mixtral_spec(config: Config) -> ArchSpec:
    config = renamed(config, "num_experts", "num_local_experts")
    c = family_fields("mixtral", {"rope_theta": 1e6, **config}, MIXTRAL)
    if c.number("router_jitter_noise"):
        raise c.lack("router_jitter_noise", "0.0; set it to 0.0, there is no noise in RL training")
    spec = dense_spec(c, windows=layer_windows(c, per_layer=False))
    moe = MoeSpec(
        layers=(True,) * spec.depth,
        num_experts=c.integer("num_local_experts"),
        top_k=c.integer("num_experts_per_tok"),
        ffn_width=spec.ffn_width,
        normalize=True,  # equals a softmax over the chosen ones
    )
    return with_experts(spec, c, moe)
