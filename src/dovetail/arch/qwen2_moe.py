"""Qwen2-MoE: Qwen2's attention; softmax routing and a shared expert with a sigmoid gate."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import (
    FULL,
    QWEN,
    SLIDING,
    dense_spec,
    family_fields,
    layer_windows,
    sparse_layers,
    with_experts,
)
from dovetail.arch.spec import ArchSpec, MoeSpec

DEFAULTS: Mapping[str, Any] = {
    **QWEN,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
}


def qwen2_moe_spec(config: Mapping[str, Any]) -> ArchSpec:
    c = family_fields("qwen2_moe", config, DEFAULTS)
    windowed = c.flag("use_sliding_window")
    if windowed and c.get("layer_types") is None:  # older configs mean every other one of the first layers
        last, depth = c.integer("max_window_layers", least=0), c.integer("num_hidden_layers")
        types = [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(depth)]
        c = family_fields("qwen2_moe", {**config, "layer_types": types}, DEFAULTS)
    windows = layer_windows(c, c.integer("sliding_window") if windowed else None)
    moe = MoeSpec(
        layers=sparse_layers(c),
        num_experts=c.integer("num_experts"),
        top_k=c.integer("num_experts_per_tok"),
        ffn_width=c.integer("moe_intermediate_size"),
        normalize=c.flag("norm_topk_prob"),
        shared_width=c.integer("shared_expert_intermediate_size"),
        shared_name="shared_expert",
        shared_gate=True,
    )
    return with_experts(dense_spec(c, windows=windows, qkv_bias=c.flag("qkv_bias")), c, moe)
