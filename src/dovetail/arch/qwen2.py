"""Qwen2 and Qwen2.5: biases on q, k and v only, and optional sliding windows from `max_window_layers` on."""

from collections.abc import Mapping
from typing import Any

from dovetail.arch.common import QWEN, dense_spec, family_fields, qwen_windows
from dovetail.arch.spec import ArchSpec

DEFAULTS: Mapping[str, Any] = {
    **QWEN,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
}


def qwen2_spec(config: Mapping[str, Any]) -> ArchSpec:
    c = family_fields("qwen2", config, DEFAULTS)
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=True)
