"""Llama 2 and 3.x: no window; `attention_bias` and `mlp_bias` cover all projections."""

from dovetail.arch.common import BASE, Config, dense_spec, family_fields, layer_windows
from dovetail.arch.spec import ArchSpec


def llama_spec(config: Config) -> ArchSpec:
    c = family_fields("llama", config, BASE, intermediate_size=11008, max_position_embeddings=2048, mlp_bias=False)
    if c.get("sliding_window") is not None:
        raise c.refusal("sliding_window", "null; a windowed model of this shape has model_type mistral")
    bias = c.flag("attention_bias")
    windows = layer_windows(c, used=False, per_layer=False)
    return dense_spec(c, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=c.flag("mlp_bias"))
