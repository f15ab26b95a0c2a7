"""Tiny random models of the families that the transformers engine is proved on."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers import (
    ApertusConfig,
    Gemma3TextConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Kimi_K25Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.helpers.parity_configs import WINDOW, tiny

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def _make(kind: type[PreTrainedConfig], **options: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: tiny(kind, **options)


# Eight heads, two of keys and values: cp 1, 2, 4 and 8 exchange heads, from 4 on with copies. Each call makes a fresh config.
TEXT: Mapping[str, Callable[[], PreTrainedConfig]] = MappingProxyType(
    {
        "llama": _make(LlamaConfig, attention_bias=True, mlp_bias=True),
        "mistral_window": _make(MistralConfig, sliding_window=WINDOW),
        "qwen2_tied": _make(Qwen2Config, tie_word_embeddings=True),
        "qwen3": _make(Qwen3Config, head_dim=16),
        "apertus": _make(ApertusConfig, rope_parameters=PLAIN),
        "gemma3": _make(
            Gemma3TextConfig,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=12,
        ),
    }
)


# Placeholder tokens of the tiny vision-language models. GLM-4V has image tokens in its videos, between tokens of their own.
IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END = range(100, 106)
WORDS = 100  # ids of text: those below
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GLM_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
MLA = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    **EXPERTS,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}
TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
DEEP_TOWER = {
    **TOWER,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


def _sighted(
    kind: type[PreTrainedConfig], tower: Mapping[str, Any], ids: Mapping[str, int], **text: Any
) -> Any:
    shape = _make(LlamaConfig)().to_dict()
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    )
    sizes = (
        {name: shape[name] for name in names} | {"rope_parameters": MROPE, "pad_token_id": 0} | text
    )
    return lambda: kind(
        text_config=dict(sizes), vision_config=dict(tower), tie_word_embeddings=False, **ids
    )


VISION: Mapping[str, Callable[[], PreTrainedConfig]] = MappingProxyType(
    {
        "qwen2_vl": _sighted(
            Qwen2VLConfig,
            {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "patch_size": 4,
                "mlp_ratio": 2,
            },
            QWEN_IDS,
        ),
        "qwen2_5_vl": _sighted(
            Qwen2_5_VLConfig,
            {
                **TOWER,
                "out_hidden_size": 64,
                "intermediate_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            QWEN_IDS,
        ),
        "qwen3_vl": _sighted(
            Qwen3VLConfig,
            DEEP_TOWER,
            QWEN_IDS,
            head_dim=16,
            rope_parameters={**MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        ),
        "glm4v": _sighted(
            Glm4vConfig,
            {**TOWER, "out_hidden_size": 64, "intermediate_size": 64, "image_size": 32},
            GLM_IDS,
            rope_parameters={**MROPE, "partial_rotary_factor": 1.0},
        ),
        "qwen3_vl_moe": _sighted(
            Qwen3VLMoeConfig,
            DEEP_TOWER,
            QWEN_IDS,
            head_dim=16,
            rope_parameters={**MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            decoder_sparse_step=1,
        ),
        "glm4v_moe": _sighted(
            Glm4vMoeConfig,
            {**TOWER, "out_hidden_size": 64, "intermediate_size": 64, "image_size": 32},
            GLM_IDS,
            head_dim=16,
            rope_parameters={**MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0},
            first_k_dense_replace=1,
            **EXPERTS,
        ),
        "kimi_k25": _sighted(
            Kimi_K25Config,
            {
                "patch_size": 4,
                "pos_emb_height": 8,
                "pos_emb_width": 8,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
            },
            {**QWEN_IDS, "projection_hidden_size": 32},
            **{**MLA, "q_lora_rank": 24},
        ),
    }
)
