"""Qwen2, 2.5: biases on q, k, v; optional windows. Qwen2-MoE: softmax routing, a gated shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.arch.common import (
    FULL,
    QWEN,
    SLIDING,
    Config,
    dense_spec,
    family_fields,
    layer_windows,
    qwen_moe,
    qwen_windows,
    with_experts,
)
from dovetail.arch.spec import ArchSpec

MOE: Mapping[str, Any] = {
    **QWEN, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
    "num_experts": 60, "norm_topk_prob": False,
}  # fmt: skip


def qwen2_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen2", config, QWEN, intermediate_size=22016, num_key_value_heads=32)
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=True)


def qwen2_moe_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen2_moe", config, MOE)
    windowed = c.flag("use_sliding_window")
    if windowed and c.get("layer_types") is None:  # every other one, in older configs
        last, depth = c.integer("max_window_layers", least=0), c.integer("num_hidden_layers")
        types = [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(depth)]
        c = replace(c, config={**config, "layer_types": types})
    spec = dense_spec(c, windows=layer_windows(c, used=windowed), qkv_bias=c.flag("qkv_bias"))
    shared_width = c.integer("shared_expert_intermediate_size")
    moe = replace(qwen_moe(c), shared_width=shared_width, shared_name="shared_expert", shared_gate=True)
    return with_experts(spec, c, moe)
