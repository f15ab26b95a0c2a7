"""DeepSeek-V2, V3, Moonlight, Kimi-K2: latent attention, grouped routing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.arch.common import (
    BASE,
    Config,
    Fields,
    dense_spec,
    family_fields,
    layer_windows,
    renamed,
    rope_fields,
    with_experts,
    yarn_mscale,
)
from dovetail.arch.spec import ArchSpec, LatentSpec, MoeSpec

SHARED: Mapping[str, Any] = {
    **BASE, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_layer_freq": 1,
}  # fmt: skip
V2: Mapping[str, Any] = {
    **SHARED, "vocab_size": 102400, "intermediate_size": 11008, "moe_intermediate_size": 1407,
    "max_position_embeddings": 2048, "mlp_bias": False, "first_k_dense_replace": 0,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None,
    "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "topk_method": "greedy",
    "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip
V3: Mapping[str, Any] = {
    **SHARED, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid",
    "rope_interleave": True,
}  # fmt: skip
MAX_PREDICTORS = 64  # layers of multi-token prediction, after the last one


def deepseek_v2_spec(config: Config) -> ArchSpec:
    c = family_fields("deepseek_v2", renamed(config, "num_experts", "n_routed_experts"), V2)
    if c.get("norm_topk_prob"):
        supported = "false, which is all that transformers computes for this family"
        raise c.lack("norm_topk_prob", supported)
    _only(c, "scoring_func", "softmax")
    if c.get("topk_method") not in ("greedy", "group_limited_greedy"):
        raise c.refusal("topk_method", "greedy and group_limited_greedy")
    moe = _moe(c, grouped=c.get("topk_method") == "group_limited_greedy")
    return with_experts(_latent(c, mlp_bias=c.flag("mlp_bias")), c, moe)


def deepseek_v3_spec(config: Config) -> ArchSpec:
    config = renamed(config, "num_local_experts", "n_routed_experts")
    config = renamed(config, "num_nextn_predict_layers", "num_mtp_layers")
    c = family_fields("deepseek_v3", config, V3)
    _only(c, "scoring_func", "sigmoid")
    _only(c, "topk_method", "noaux_tc")
    rope_dim = c.get("qk_rope_head_dim")
    if c.get("head_dim") not in (None, rope_dim):
        supported = f"qk_rope_head_dim={rope_dim}, whose rotary table it is, or none"
        raise c.refusal("head_dim", supported)
    moe = replace(_moe(c, grouped=True), scores="sigmoid", bias=True, group_score="top2")
    if moe.num_experts < 2 * moe.groups:
        raise c.refusal("n_group", "groups of two experts or more: a group is worth its best two")
    moe = replace(moe, normalize=c.flag("norm_topk_prob"))
    spec = with_experts(_latent(c, interleaved=c.flag("rope_interleave")), c, moe)
    count = min(c.integer("num_mtp_layers"), MAX_PREDICTORS) if c.get("num_mtp_layers") else 1
    predictors = range(spec.depth, spec.depth + count)
    return replace(spec, ignored=tuple(f"model.layers.{layer}.*" for layer in predictors))


def _moe(c: Fields, *, grouped: bool) -> MoeSpec:
    _only(c, "moe_layer_freq", 1)
    depth = c.integer("num_hidden_layers")
    first = c.integer("first_k_dense_replace", least=0)
    experts = c.integer("n_routed_experts")
    width = c.integer("moe_intermediate_size")
    groups = c.integer("n_group") if grouped else 1
    if experts % groups:
        raise c.refusal("n_group", f"a divisor of n_routed_experts={experts}")
    kept = c.integer("topk_group") if grouped else 1
    if kept > groups:
        raise c.refusal("topk_group", f"at most n_group={groups}")
    return MoeSpec(
        layers=tuple(layer >= first for layer in range(depth)),
        num_experts=experts,
        top_k=c.integer("num_experts_per_tok"),
        ffn_width=width,
        scale=c.number("routed_scaling_factor"),
        groups=groups,
        kept_groups=kept,
        shared_width=width * c.integer("n_shared_experts"),
    )


def _latent(c: Fields, *, interleaved: bool = True, mlp_bias: bool = False) -> ArchSpec:
    heads = c.integer("num_attention_heads")
    bias = c.flag("attention_bias")
    if c.get("num_key_value_heads") not in (None, heads):
        supported = f"num_attention_heads={heads}: every head has its own key and value"
        raise c.refusal("num_key_value_heads", supported)
    latent = LatentSpec(
        q_rank=None if c.get("q_lora_rank") is None else c.integer("q_lora_rank"),
        kv_rank=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        rope_dim=c.integer("qk_rope_head_dim"),
        v_dim=c.integer("v_head_dim"),
        stretch=_stretch(c),
        interleaved=interleaved,
        bias=bias,
    )
    c = replace(c, config={**c.config, "head_dim": latent.rope_dim, "num_key_value_heads": heads})
    windows = layer_windows(c, used=False, per_layer=False)
    spec = dense_spec(c, windows=windows, o_bias=bias, mlp_bias=mlp_bias)
    if spec.rope.rotary_dim != latent.rope_dim:
        r = rope_fields(c)
        key = "partial_rotary_factor"
        raise (r if key in r else c).refusal(key, "1.0: all qk_rope_head_dim channels turn")
    attention = replace(spec.attention, head_dim=max(latent.key_dim, latent.v_dim), latent=latent)
    return replace(spec, mixers=(attention,) * spec.depth)


def _stretch(c: Fields) -> float:
    """Return the mscale of yarn, squared."""
    r = rope_fields(c)
    if r.get("rope_type") == "default" or not r.get("mscale_all_dim") or not r.get("factor"):
        return 1.0
    return yarn_mscale(r.number("mscale_all_dim"), r.number("factor")) ** 2


def _only(c: Fields, key: str, value: object) -> None:
    if c.get(key) != value:
        raise c.refusal(key, f"{value} only")
