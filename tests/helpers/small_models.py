"""Small models of families that transformers has."""

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.helpers.parity_configs import VOCAB

# Three key-value heads, heads of 24 channels, windows shorter than the sequences, dropout of every kind.
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 60, "intermediate_size": 72, "num_hidden_layers": 4},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "sliding_window": 5},
    **{"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **{
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
    },
    **{
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    **{"moe_num_experts": 4, "moe_k": 2, "shared_expert_intermediate_size": 24},
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),
        0.1,
    ),
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LONGCAT = {  # its own names
    **{"num_layers": 2, "ffn_hidden_size": 72, "expert_ffn_hidden_size": 24},
    **{"moe_topk": 2, "zero_expert_num": 2, "head_dim": LATENT["qk_rope_head_dim"]},
}


def small(family: str) -> PreTrainedConfig:
    """A config with what a family has of our sizes, and every kind of layer that it has by default."""
    kind = CONFIG_MAPPING[family]
    usual = kind()
    known = {*usual.to_dict(), *inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    sizes: dict[str, Any] = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        sizes = {name: value for name, value in sizes.items() if name != "head_dim"} | LATENT
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if family == "longcat_flash":
        sizes |= LONGCAT
    kinds = list(dict.fromkeys(usual.to_dict().get("layer_types") or ()))
    if kinds:
        sizes["layer_types"] = (kinds * 4)[:4]
    found: PreTrainedConfig = kind(**sizes)
    return found
