"""Qwen2 and Qwen2.5: biases on q, k and v only, and optional sliding windows from `max_window_layers` on."""

from dovetail.arch.common import QWEN, Config, dense_spec, family_fields, qwen_windows
from dovetail.arch.spec import ArchSpec


def qwen2_spec(config: Config) -> ArchSpec:
    c = family_fields("qwen2", config, QWEN, intermediate_size=22016, num_key_value_heads=32)
    return dense_spec(c, windows=qwen_windows(c), qkv_bias=True)
