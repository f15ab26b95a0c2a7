"""Weights for the plugin of vLLM."""

import torch

WEIGHTS = {
    f"model.layers.{i}.{name}": torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(
        dtype
    )
    for i in range(6)
    for name, shape, dtype in (
        ("input_layernorm.weight", (37,), torch.bfloat16),
        ("self_attn.q_proj.weight", (16, 37), torch.bfloat16),
        ("self_attn.k_proj.weight", (8, 37), torch.bfloat16),
        ("self_attn.v_proj.weight", (8, 37), torch.bfloat16),
        ("mlp.down_proj.weight", (37, 11), torch.float32),
        ("mlp.down_proj.weight_scale", (5,), torch.float8_e4m3fn),
    )
}
