"""Tiny random models of the families that the transformers engine is proved on."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers import (
    ApertusConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.parity.configs import VOCAB, WINDOW

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def _make(kind: type[PreTrainedConfig], **options: Any) -> Callable[[], PreTrainedConfig]:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return lambda: kind(**{**shape, **options})


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
