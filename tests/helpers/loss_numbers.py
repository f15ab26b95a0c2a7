"""Random numbers for losses, and settings of TRL's losses with ours for the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LENGTHS, LONGEST = [3, 7, 1, 5], 8  # counted tokens of responses, and the most that could be

Settings = Mapping[str, Any]
TRL_LOSSES: Mapping[str, tuple[Settings, Settings]] = {
    "grpo": ({"loss_type": "grpo", "beta": 0.3}, {"aggregation": "sequence", "kl_coef": 0.3}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo", "epsilon": 0.1}, {"aggregation": "sequence_sum", "clip_low": 0.1}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"aggregation": "sequence", "ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"term": "cispo", "clip_low": 1.0, "clip_high": 0.3}),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.5, "beta": 0.1},
        {"aggregation": "sequence", "term": "sapo", "tau_positive": 0.75, "tau_negative": 1.5, "kl_coef": 0.1},
    ),
    "token_truncate": (
        {"loss_type": "dapo", "beta": 0.3, "mode": "token_truncate", "clip_min": 0.7, "clip_max": 1.3},
        {"kl_coef": 0.3, "correction": {"ratio": "token", "bounds": (0.7, 1.3), "outside": "clamp"}},
    ),
    "token_mask": (
        {"loss_type": "grpo", "mode": "token_mask", "clip_min": 0.5, "clip_max": 1.5},
        {"aggregation": "sequence", "correction": {"ratio": "token", "bounds": (0.5, 1.5), "outside": "mask"}},
    ),
    "sequence_truncate": (
        {"loss_type": "cispo", "epsilon_high": 1.3, "mode": "sequence_truncate", "clip_min": None, "clip_max": 1.1},
        {
            "term": "cispo", "clip_low": 1.0, "clip_high": 0.3,
            "correction": {"ratio": "sequence", "bounds": (0.0, 1.1), "outside": "clamp"},
        },
    ),
    "sequence_mask": (
        {"loss_type": "dr_grpo", "beta": 0.1, "mode": "sequence_mask", "clip_min": None, "clip_max": 1.5},
        {
            "aggregation": "sequence_sum", "kl_coef": 0.1,
            "correction": {"ratio": "sequence", "bounds": (0.0, 1.5), "outside": "mask"},
        },
    ),
}  # fmt: skip


def random_numbers() -> dict[str, Tensor]:
    """[T] in float64: ratios on both sides of the clips, one advantage for each response."""
    draw = torch.Generator().manual_seed(11)
    total = sum(LENGTHS)

    def normal(n: int = total) -> Tensor:
        return torch.randn(n, generator=draw, dtype=torch.float64)

    numbers = {
        "logprob": normal() * 0.4 - 2,
        "entropy": normal().abs(),
        "old_logprob": normal() * 0.4 - 2,
    }
    advantage = normal(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    numbers |= {"reference_logprob": normal() * 0.4 - 2, "advantage": advantage}
    return {**numbers, "rollout_logprob": normal() * 0.4 - 2}
