"""Losses and gradients that PEFT computes on transformers for the tiny models."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.helpers.parity_configs import moe_configs, tiny_configs, tiny_model
from tests.helpers.parity_reference import GRAD, make_batch, outputs_of, rows_of

PEFT_PREFIX = "base_model.model."
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_config(**changes: object) -> LoraConfig:
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": [*TARGETS],
        "init_lora_weights": False,
    }
    return LoraConfig(**{**options, **changes})


def write_peft(
    name: str, folder: Path, config: LoraConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Write a tiny model as `model/` and an adapter of random values as `adapter/`.

    Returns what PEFT computes with them: log-probs, entropies, the loss, and the gradients of A
    and B under the names of PEFT's file.
    """
    model = tiny_model((tiny_configs() | moe_configs())[name])
    model.save_pretrained(folder / "model")
    torch.manual_seed(5)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(str(folder / "adapter"))
    adapted.to(dtype)
    batch = make_batch(dtype)
    logits = torch.cat([adapted(row[None]).logits[0] for row in rows_of(batch)])
    found = outputs_of(adapted, logits, batch)
    named = {}
    for key, tensor in found.items():
        key = key.removeprefix(GRAD + PEFT_PREFIX).replace(".default.weight", "")
        named[key] = tensor.detach()
    return named
