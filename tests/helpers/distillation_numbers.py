"""Logits and settings on which the head's divergences and TRL's are compared, and TRL's numbers: a JSON line as a process.

`python -m tests.helpers.distillation_numbers > tests/helpers/trl_distillation.json` with TRL installed.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SEQUENCES, LENGTH, VOCAB = 2, 5, 11
IGNORED = -100
GKD_CASES: Mapping[str, Mapping[str, float]] = {
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0},
    "half": {"beta": 0.5},
    "tenth, temperature": {"beta": 0.1, "temperature": 1.7},
    "reverse, temperature": {"beta": 1.0, "temperature": 0.6},
}


def gkd_logits(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(SEQUENCES, LENGTH, VOCAB, generator=draw, dtype=torch.float64)


def gkd_labels() -> Tensor:
    labels = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH) % VOCAB
    labels[0, :2] = labels[1, -1] = IGNORED
    return labels


def value_and_gradient(loss: Any, keys: Mapping[str, float]) -> dict[str, Any]:
    logits = gkd_logits(1).requires_grad_()
    total = loss(logits, gkd_logits(2), labels=gkd_labels(), **keys)
    (gradient,) = torch.autograd.grad(total, logits)
    return {"loss": float(total.detach()), "gradient": gradient.flatten().tolist()}


if __name__ == "__main__":
    trainer = importlib.import_module("trl.experimental.gkd").GKDTrainer
    numbers = {
        name: value_and_gradient(trainer.generalized_jsd_loss, keys)
        for name, keys in GKD_CASES.items()
    }
    sys.stdout.write(json.dumps(numbers) + "\n")
