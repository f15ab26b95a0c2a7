"""Qwen3: QK-norm, `attention_bias` on all projections. Qwen3-MoE: softmax routing."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import (
    QWEN,
    Config,
    dense_spec,
    family_fields,
    layer_windows,
    qwen_moe,
    qwen_windows,
    renamed,
    with_experts,
)
from dovetail.arch.spec import ArchSpec

MOE: Mapping[str, Any] = {
    **QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    "num_experts": 128, "norm_topk_prob": False,
}  # fmt: skip


def qwen3_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen3", config, QWEN, intermediate_size=22016, num_key_value_heads=32, head_dim=128)
    bias = c.flag("attention_bias")
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=bias, o_bias=bias, qk_norm=True)


def qwen3_moe_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen3_moe", renamed(config, "num_local_experts", "num_experts"), MOE)
    bias, windows = c.flag("attention_bias"), layer_windows(c, used=c.flag("use_sliding_window"), per_layer=False)
    return with_experts(dense_spec(c, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True), c, qwen_moe(c))
