"""Qwen3 (dense): explicit head_dim, RMSNorm on the heads of q and k, `attention_bias` on all four projections."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import QWEN, dense_spec, family_fields, qwen_windows
from dovetail.arch.spec import ArchSpec

DEFAULTS: Mapping[str, Any] = {
    **QWEN,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
}


def qwen3_spec(config: Mapping[str, Any]) -> ArchSpec:
    c = family_fields("qwen3", config, DEFAULTS)
    bias = c.flag("attention_bias")
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=bias, o_bias=bias, qk_norm=True)
