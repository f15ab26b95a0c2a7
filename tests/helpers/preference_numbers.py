"""Rows, logits and settings of preference losses: TRL's names with ours for the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

VOCAB, PROMPTS = 5, (2, 1, 2)  # ids are 1 to VOCAB - 1; tokens of prompts
CHOSEN = ([1, 2, 3, 4], [2, 1, 3, 3, 1, 4], [3, 1, 2, 4])
REJECTED = ([1, 2, 4], [2, 4], [3, 1, 1, 1, 2, 4])
LONGEST = max(map(len, (*CHOSEN, *REJECTED)))
LABELS = (True, False, True, True, False, False)  # of KTO's rows: CHOSEN, then REJECTED
KL = 0.3  # KTO's z

Settings = Mapping[str, Any]
TRL_PREFERENCES: Mapping[str, tuple[str, Settings, Settings]] = {
    "sigmoid": ("dpo", {"beta": 0.3}, {"beta": 0.3}),
    "hinge": ("dpo", {"loss_type": "hinge", "beta": 0.7}, {"kind": "hinge", "beta": 0.7}),
    "ipo": ("dpo", {"loss_type": "ipo", "beta": 0.2}, {"kind": "ipo", "beta": 0.2}),
    "robust": (
        "dpo",
        {"loss_type": "robust", "label_smoothing": 0.1, "beta": 0.5},
        {"kind": "robust", "label_smoothing": 0.1, "beta": 0.5},
    ),
    "kto": (
        "kto",
        {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.75},
        {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.75},
    ),
    "cpo": ("cpo", {"beta": 0.2, "cpo_alpha": 0.6}, {"beta": 0.2, "alpha": 0.6}),
    "cpo_smooth": (
        "cpo",
        {"beta": 0.2, "label_smoothing": 0.1},
        {"beta": 0.2, "label_smoothing": 0.1, "alpha": 1.0},
    ),
    "cpo_hinge": (
        "cpo",
        {"loss_type": "hinge", "beta": 0.2},
        {"kind": "hinge", "beta": 0.2, "alpha": 1.0},
    ),
    "cpo_ipo": (
        "cpo",
        {"loss_type": "ipo", "beta": 0.2},
        {"kind": "ipo", "beta": 0.2, "alpha": 1.0},
    ),
    "simpo": (
        "cpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
        {"kind": "simpo", "beta": 2.0, "gamma": 0.7, "alpha": 0.0},
    ),
    "orpo": ("orpo", {"beta": 0.3}, {"beta": 0.3}),
    "reward": ("reward", {"center_rewards_coefficient": 0.05}, {"center": 0.05}),
}


def random_logits(seed: int = 3) -> Tensor:
    """[rows, LONGEST, VOCAB] in float64 of policy (seed 3) or reference."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(len(CHOSEN) * 2, LONGEST, VOCAB, generator=draw, dtype=torch.float64)
