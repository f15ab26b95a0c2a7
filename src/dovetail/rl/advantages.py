"""Advantage estimators over packed tokens [T] and responses [S], in float32 or wider."""

import torch
from torch import Tensor

from dovetail.kernels.reference import sum_rows, widened


def terminal_rewards(scores: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Token rewards [T]: scores [S] at the last response tokens, 0 elsewhere."""
    scores = widened(scores)
    where = mask.nonzero().flatten()
    owner = sequence_ids[where]
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    rewards = scores.new_zeros(mask.shape)
    rewards[where[last]] = scores[owner[last]]
    return rewards


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Advantages [T] and returns [T] of masked tokens, 0 elsewhere: Schulman et al. 2016, eqs. 12 and 16.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)        A_t = delta_t + gamma lam A_{t+1}
    """
    rewards = widened(rewards.detach())
    values = widened(values.detach())
    where = mask.nonzero().flatten()
    owner = sequence_ids[where]
    num_sequences = int(sequence_ids[-1]) + 1 if len(sequence_ids) else 0
    counts = torch.bincount(owner, minlength=num_sequences)
    steps = torch.arange(len(where), device=where.device) - (counts.cumsum(0) - counts)[owner]
    longest = int(counts.max()) if num_sequences else 0

    reward = rewards.new_zeros(num_sequences, longest)
    value = values.new_zeros(num_sequences, longest + 1)
    reward[owner, steps] = rewards[where]
    value[owner, steps] = values[where]

    exists = torch.arange(longest, device=where.device) < counts[:, None]
    delta = (reward + gamma * value[:, 1:] - value[:, :-1]) * exists
    advantage = torch.zeros_like(delta)
    carry = delta.new_zeros(num_sequences)
    for step in range(longest - 1, -1, -1):
        carry = delta[:, step] + gamma * lam * carry
        advantage[:, step] = carry

    packed = delta.new_zeros(mask.shape)
    packed[where] = advantage[owner, steps]
    return packed, torch.where(mask, packed + values, 0.0)


def group_relative(
    rewards: Tensor, groups: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """(r - mean) / (std + eps) [S] within groups, std of n - 1; exactly 0 where rewards are equal.

    Shao et al. 2024, section 4.1.2; without the division: Liu et al. 2025, section 3.2.
    """
    rewards = widened(rewards)
    member, size, differs = _group(rewards, groups)
    centered = torch.where(
        differs, rewards - sum_rows(rewards, member, len(size))[member] / size[member], 0.0
    )
    if not divide_by_std:
        return centered
    variance = sum_rows(centered * centered, member, len(size)) / (size - 1).clamp(min=1)
    return centered / (variance.sqrt()[member] + eps)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group's others [S], 0 where rewards are equal. RLOO: Ahmadian et al. 2024, section 4."""
    rewards = widened(rewards)
    member, size, differs = _group(rewards, groups)
    others = (sum_rows(rewards, member, len(size))[member] - rewards) / (size - 1).clamp(min=1)[
        member
    ]
    return torch.where(differs, rewards - others, 0.0)


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) of masked entries, var of n - 1; 0 elsewhere."""
    x = widened(x)
    chosen = x[mask]
    mean = chosen.sum() / max(len(chosen), 1)
    variance = (
        ((chosen - mean) ** 2).sum() / (len(chosen) - 1)
        if len(chosen) > 1
        else torch.ones_like(mean)
    )
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + eps), 0.0)


def _group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group index [S], group sizes, whether a group's rewards differ [S]."""
    _, member = torch.unique(groups, return_inverse=True)
    size = torch.bincount(member)
    least = rewards.new_zeros(len(size)).scatter_reduce(
        0, member, rewards, "amin", include_self=False
    )
    most = rewards.new_zeros(len(size)).scatter_reduce(
        0, member, rewards, "amax", include_self=False
    )
    return member, size, (least != most)[member]
