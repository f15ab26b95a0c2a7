"""Qwen2 (biases on q, k, v), Qwen3 (QK-norm), and their MoE models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.arch.common import (
    BASE,
    FULL,
    SLIDING,
    Config,
    Fields,
    dense_spec,
    family_fields,
    layer_windows,
    renamed,
    with_experts,
)
from dovetail.arch.spec import ArchSpec, MoeSpec

QWEN: Mapping[str, Any] = {
    **BASE, "vocab_size": 151936, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
QWEN2_MOE: Mapping[str, Any] = {
    **QWEN, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
    "norm_topk_prob": False,
}  # fmt: skip
QWEN3_MOE: Mapping[str, Any] = {
    **QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    "norm_topk_prob": False,
}  # fmt: skip


def qwen2_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen2", config, QWEN, intermediate_size=22016, num_key_value_heads=32)
    return dense_spec(c, windows=_windows(c), qkv_bias=True)


def qwen2_moe_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen2_moe", config, QWEN2_MOE)
    windowed = c.flag("use_sliding_window")
    if windowed and c.get("layer_types") is None:  # older configs mean every other layer
        last = c.integer("max_window_layers", least=0)
        depth = c.integer("num_hidden_layers")
        types = [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(depth)]
        c = replace(c, config={**config, "layer_types": types})
    spec = dense_spec(c, windows=layer_windows(c, used=windowed), qkv_bias=c.flag("qkv_bias"))
    shared_width = c.integer("shared_expert_intermediate_size")
    moe = replace(_moe(c), shared_width=shared_width, shared_name="shared_expert", shared_gate=True)
    return with_experts(spec, c, moe)


def qwen3_spec(config: Config) -> ArchSpec:
    sizes = {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128}
    c = family_fields("qwen3", config, QWEN, **sizes)
    bias = c.flag("attention_bias")
    return dense_spec(c, windows=_windows(c), qkv_bias=bias, o_bias=bias, qk_norm=True)


def qwen3_moe_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen3_moe", renamed(config, "num_local_experts", "num_experts"), QWEN3_MOE)
    bias = c.flag("attention_bias")
    windows = layer_windows(c, used=c.flag("use_sliding_window"), per_layer=False)
    spec = dense_spec(c, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return with_experts(spec, c, _moe(c))


def _windows(c: Fields) -> tuple[int | None, ...]:
    """Return windows from `max_window_layers` on, if `use_sliding_window`."""
    used = c.flag("use_sliding_window")
    return layer_windows(c, used=used, first=c.integer("max_window_layers", least=0))


def _moe(c: Fields) -> MoeSpec:
    """Return experts in every `decoder_sparse_step`-th layer outside of `mlp_only_layers`."""
    step = c.integer("decoder_sparse_step")
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise c.refusal("mlp_only_layers", "a list of layer numbers")
    depth = c.integer("num_hidden_layers")
    return MoeSpec(
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(depth)),
        num_experts=c.integer("num_experts"),
        top_k=c.integer("num_experts_per_tok"),
        ffn_width=c.integer("moe_intermediate_size"),
        normalize=c.flag("norm_topk_prob"),
    )
