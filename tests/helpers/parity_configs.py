"""Tiny transformers configs of every family and option that parity tests must cover, and random checkpoints of them.

Every one can be cut over tp 1, 2, 4 and 8; with 2 key-value heads, tp 4 and 8 hold copies of them. 131 words divide by
none of these, nor do some widths of MLPs and experts.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dovetail.hf.transformers_model import group_even_experts

VOCAB = 131
MAX_POSITIONS = 64  # of the variants whose tables follow each sequence's length: sequences of tests lie on both sides of it
PADS = (
    66,
    130,
)  # ids that sequences of tests have; transformers does not train a pad's row where it is looked up
ODD = 93  # a width of MLPs that no tp divides
NORM_EPS = (
    1e-3  # no family's default, nor that of MLA's latent norms: a norm with another eps shows
)
WINDOW = 5  # of the windowed variants: shorter than the sequences that tests use

EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
)


def latent() -> dict[str, Any]:
    """What the tiny DeepSeek models share: one dense layer, shared experts, odd ranks, heads of 12 + 8 and values of 16."""
    return {
        "num_key_value_heads": None,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "routed_scaling_factor": 1.7,
    }


class Configs(Mapping[str, PreTrainedConfig]):
    """Configs by name, each made when it is asked for, and made anew: transformers changes those that it is given."""

    def __init__(self, makers: Mapping[str, Callable[[], PreTrainedConfig]]) -> None:
        self.makers = makers

    def __getitem__(self, name: str) -> PreTrainedConfig:
        return self.makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self.makers

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)

    def __or__(self, other: "Configs") -> "Configs":
        return Configs({**self.makers, **other.makers})


def tiny_configs() -> Configs:
    """Every dense variant by name."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": MAX_POSITIONS,
        "short_factor": [1.0, 1.1, 1.5, 2.0],
        "long_factor": [1.2, 2.5, 6.0, 16.0],
    }
    windowed = {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    }
    mixed = ["sliding_attention", "full_attention"]
    return Configs(
        {
            "apertus": partial(tiny, ApertusConfig, rope_parameters=llama3, pad_token_id=PADS[0]),
            "apertus_biases": partial(
                tiny,
                ApertusConfig,
                rope_parameters=llama3,
                attention_bias=True,
                num_key_value_heads=8,
            ),
            "llama": partial(tiny, LlamaConfig),
            "llama_tied": partial(
                tiny, LlamaConfig, tie_word_embeddings=True, pad_token_id=PADS[0]
            ),
            "llama_biases": partial(
                tiny, LlamaConfig, attention_bias=True, mlp_bias=True, intermediate_size=ODD
            ),
            "llama_all_kv_heads": partial(tiny, LlamaConfig, num_key_value_heads=8),
            "llama_one_kv_head": partial(tiny, LlamaConfig, num_key_value_heads=1),
            "llama_head_dim": partial(tiny, LlamaConfig, head_dim=16),
            "llama_linear": partial(
                tiny,
                LlamaConfig,
                rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            ),
            "llama_dynamic": partial(
                tiny,
                LlamaConfig,
                max_position_embeddings=MAX_POSITIONS,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "llama_longrope": partial(tiny, LlamaConfig, rope_parameters=longrope),
            "llama_llama3": partial(tiny, LlamaConfig, rope_parameters=llama3),
            "llama_yarn": partial(tiny, LlamaConfig, rope_parameters=yarn),
            "llama_partial": partial(tiny, LlamaConfig, partial_rotary_factor=0.5),
            "mistral": partial(tiny, MistralConfig, sliding_window=None),
            "mistral_window": partial(tiny, MistralConfig, sliding_window=WINDOW),
            "qwen2": partial(tiny, Qwen2Config),
            "qwen2_tied": partial(
                tiny, Qwen2Config, tie_word_embeddings=True, pad_token_id=PADS[1]
            ),
            "qwen2_window": partial(tiny, Qwen2Config, **windowed),
            "qwen2_yarn": partial(
                tiny, Qwen2Config, rope_parameters={**yarn, "mscale": 0.7, "mscale_all_dim": 1.3}
            ),
            "qwen3": partial(tiny, Qwen3Config, head_dim=16, pad_token_id=PADS[1]),
            "qwen3_tied": partial(tiny, Qwen3Config, head_dim=16, tie_word_embeddings=True),
            "qwen3_biases": partial(tiny, Qwen3Config, head_dim=16, attention_bias=True),
            "qwen3_window": partial(
                tiny,
                Qwen3Config,
                head_dim=16,
                **{**windowed, "num_hidden_layers": 2, "layer_types": mixed},
            ),
        }
    )


def moe_configs() -> Configs:
    """The same of mixtures of experts and latent attention: expert counts that 2 and 4 divide, dense layers between."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return Configs(
        {
            "deepseek_v2": partial(
                tiny,
                DeepseekV2Config,
                **{**latent(), "moe_intermediate_size": 15, "n_shared_experts": 3},
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
            ),
            "deepseek_v2_greedy": partial(
                tiny, DeepseekV2Config, **{**latent(), "q_lora_rank": None}, attention_bias=True
            ),
            "deepseek_v3": partial(tiny, DeepseekV3Config, **latent(), n_group=4, topk_group=2),
            "deepseek_v3_halves": partial(
                tiny,
                DeepseekV3Config,
                **{
                    **latent(),
                    "q_lora_rank": None,
                    "num_hidden_layers": 2,
                    "qk_nope_head_dim": 5,
                    "v_head_dim": 24,
                },
                n_group=1,
                topk_group=1,
                rope_interleave=False,
                rope_parameters={**yarn, "mscale": 0.7, "mscale_all_dim": 1.3},
            ),
            "mixtral": partial(tiny, MixtralConfig, num_local_experts=8, intermediate_size=32),
            "mixtral_window": partial(
                tiny, MixtralConfig, num_local_experts=4, sliding_window=WINDOW
            ),
            "qwen2_moe": partial(
                tiny,
                Qwen2MoeConfig,
                **EXPERTS,
                shared_expert_intermediate_size=48,
                decoder_sparse_step=2,
                num_hidden_layers=4,
            ),
            "qwen2_moe_tied": partial(
                tiny,
                Qwen2MoeConfig,
                **EXPERTS,
                shared_expert_intermediate_size=40,
                mlp_only_layers=[0],
                tie_word_embeddings=True,
            ),
            "qwen3_moe": partial(
                tiny,
                Qwen3MoeConfig,
                **{**EXPERTS, "moe_intermediate_size": 23},
                head_dim=16,
                norm_topk_prob=True,
            ),
            "qwen3_moe_many": partial(
                tiny,
                Qwen3MoeConfig,
                **{**EXPERTS, "num_experts": 64},
                head_dim=16,
                attention_bias=True,
            ),
        }
    )


def tiny_model(config: PreTrainedConfig, *, seed: int = 0, values: bool = False) -> PreTrainedModel:
    """A random float32 model in evaluation mode, no parameter at its initial zeros or ones.

    values: a token classifier with one label, the form of a critic, in place of the language model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if values:
            config.num_labels, config.classifier_dropout = 1, 0.0
        kind = AutoModelForTokenClassification if values else AutoModelForCausalLM
        model: PreTrainedModel = kind.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        group_even_experts(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # the one buffer that checkpoints have
                    buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()


def save_tiny(
    config: PreTrainedConfig,
    path: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **save: Any,
) -> PreTrainedModel:
    """Write `tiny_model(config)` in `dtype` as an HF directory and return it, rounded to what was written.

    save: passed to save_pretrained, such as max_shard_size.
    """
    model = tiny_model(config, seed=seed)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(path, **save)
    return model


def tiny(kind: type[PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    shape: Mapping[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": NORM_EPS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return kind(**{**shape, **deepcopy(options)})
