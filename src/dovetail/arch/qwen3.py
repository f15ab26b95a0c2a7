"""Qwen3 (dense): explicit head_dim, RMSNorm on the heads of q and k, `attention_bias` on all four projections."""

from dovetail.arch.common import QWEN, Config, dense_spec, family_fields, qwen_windows
from dovetail.arch.spec import ArchSpec


def qwen3_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen3", config, QWEN, intermediate_size=22016, num_key_value_heads=32, head_dim=128)
    bias = c.flag("attention_bias")
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=bias, o_bias=bias, qk_norm=True)
