"""Advantage estimators: what each response token, or each whole response, was worth compared with what was expected.

Pure functions of tensors. Token quantities are packed [T] with `sequence_ids` [T] and `mask` [T] as in `PackedBatch`:
index i stands for the prediction made at position i, so `values[i]` is the critic's output there, before target i is
known, and `mask[i]` is True where target i is a response token. Response quantities are [S]. Results keep the wider of
the input's type and float32.
"""

import torch
from torch import Tensor

from dovetail.kernels.reference import widened


def terminal_rewards(scores: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Token rewards [T] that are 0 but at each response's last token, which gets its sequence's score [S].

    A sequence without response tokens gets none. Whether a response ended by a stop token or by its length makes no
    difference here: the last token that was sampled carries the score.
    """
    scores = widened(scores)
    where = mask.nonzero().flatten()
    owner = sequence_ids[where]
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    rewards = scores.new_zeros(mask.shape)
    rewards[where[last]] = scores[owner[last]]
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, sequence_ids: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: advantages [T] and returns [T] (advantage + value), both 0 outside the mask.

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t)        A_t = delta_t + gamma lam A_{t+1}

    Schulman et al. 2016, "High-dimensional continuous control using GAE", equations 12 and 16. Time runs over response
    tokens only: what lies between two of them (a tool's output) is skipped. After the last one the value is 0, for a
    stop as for a length end.
    """
    rewards, values = widened(rewards.detach()), widened(values.detach())
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


def group_relative(rewards: Tensor, groups: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean of i's group) / (std of i's group + eps), per response [S]; without the division, r_i - mean.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision), the std being the sample's (n - 1); Liu et
    al. 2025, "Understanding R1-Zero-like training", section 3.2, leaves the division out. `groups` [S] names each
    response's prompt by any integer; groups may differ in size, so dropped samples are simply absent. A group whose
    rewards are all equal, or that has one member, gets exactly 0.
    """
    rewards = widened(rewards)
    member, size, differs = _group(rewards, groups)
    centered = torch.where(differs, rewards - _sum(rewards, member, size)[member] / size[member], 0.0)
    if not divide_by_std:
        return centered
    variance = _sum(centered * centered, member, size) / (size - 1).clamp(min=1)
    return centered / (variance.sqrt()[member] + eps)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean of the others in i's group, per response [S]; exactly 0 where all are equal or alone.

    RLOO: Ahmadian et al. 2024, "Back to basics", section 4 (Kool et al. 2019). `groups` as in `group_relative`.
    """
    rewards = widened(rewards)
    member, size, differs = _group(rewards, groups)
    others = (_sum(rewards, member, size)[member] - rewards) / (size - 1).clamp(min=1)[member]
    return torch.where(differs, rewards - others, 0.0)


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked entries, 0 elsewhere.

    The variance is the sample's (n - 1). Fewer than two entries have none and are only centered.
    """
    x = widened(x)
    chosen = x[mask]
    mean = chosen.sum() / max(len(chosen), 1)
    variance = ((chosen - mean) ** 2).sum() / (len(chosen) - 1) if len(chosen) > 1 else torch.ones_like(mean)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + eps), 0.0)


def _group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each response's group counted from 0 [S], the groups' sizes, and whether the group's rewards differ at all [S].

    The last is a comparison, not a variance: rounding of the mean would leave a trace that the division magnifies.
    """
    _, member = torch.unique(groups, return_inverse=True)
    size = torch.bincount(member)
    least = rewards.new_zeros(len(size)).scatter_reduce(0, member, rewards, "amin", include_self=False)
    most = rewards.new_zeros(len(size)).scatter_reduce(0, member, rewards, "amax", include_self=False)
    return member, size, (least != most)[member]


def _sum(x: Tensor, member: Tensor, size: Tensor) -> Tensor:
    return x.new_zeros(len(size)).index_add(0, member, x)
