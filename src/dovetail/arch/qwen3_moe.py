"""Qwen3-MoE: Qwen3's attention; softmax routing, without shared experts, in every layer but those named dense."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import QWEN, dense_spec, family_fields, layer_windows, renamed, sparse_layers, with_experts
from dovetail.arch.spec import ArchSpec, MoeSpec

DEFAULTS: Mapping[str, Any] = {
    **QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}


def qwen3_moe_spec(config: Mapping[str, Any]) -> ArchSpec:
    c = family_fields("qwen3_moe", renamed(config, "num_local_experts", "num_experts"), DEFAULTS)
    bias, windowed = c.flag("attention_bias"), c.flag("use_sliding_window") and c.get("sliding_window") is not None
    windows = layer_windows(c, c.integer("sliding_window") if windowed else None, per_layer=False)
    moe = MoeSpec(
        layers=sparse_layers(c),
        num_experts=c.integer("num_experts"),
        top_k=c.integer("num_experts_per_tok"),
        ffn_width=c.integer("moe_intermediate_size"),
        normalize=c.flag("norm_topk_prob"),
    )
    return with_experts(dense_spec(c, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True), c, moe)
