"""From sampled completions to a packed batch with everything that a loss reads: the data half of an RL step."""

import random
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Prompt
from dovetail.rl.advantages import gae, group_relative, leave_one_out, terminal_rewards, whiten
from dovetail.rl.losses import KLEstimator, kl_estimate
from dovetail.rollout.base import Completion


@dataclass(frozen=True)
class Sample:
    """A completion with its reward. `group` numbers its prompt within the step."""

    prompt: Prompt
    group: int
    completion: Completion
    text: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages: `kind` is grpo, rloo or ppo."""

    kind: str
    scale_by_std: bool = True
    normalize: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    kl_coef: float = 0.0  # of a KL term in the reward; 0: none there
    kl_estimator: KLEstimator = "k1"


def pack_samples(samples: Seq[Sample], temperature: float) -> PackedBatch:
    """Prompt and completion of every sample, in order; the mask covers the completion's tokens.

    The field `rollout_logprob` is what the sampler drew from; where it told the experts of its tokens, the batch brings
    them along. At a temperature other than 1 (or 0, where log-probs are those at 1) the batch carries it for every token.
    """
    shared: Mapping[str, float] = {} if temperature in (0.0, 1.0) else {"temperature": temperature}
    rows = []
    for sample in samples:
        prompt, response = sample.prompt.ids, sample.completion.ids
        fields: dict[str, float | Seq[float]] = {
            **shared,
            "rollout_logprob": [0.0] * len(prompt) + list(sample.completion.log_probs),
        }
        mask, routing = [False] * len(prompt) + [True] * len(response), sample.completion.routing
        rows.append(Sequence([*prompt, *response], mask, fields, sample.prompt.media, routing))
    return PackedBatch.pack(rows)


def equal_groups(samples: Seq[Sample]) -> dict[int, bool]:
    """Of each group, whether its rewards are all the same, so that they carry no group-relative signal."""
    seen: dict[int, set[float]] = {}
    for sample in samples:
        seen.setdefault(sample.group, set()).add(sample.reward)
    return {group: len(rewards) == 1 for group, rewards in seen.items()}


def drop_equal_groups(samples: Seq[Sample]) -> list[Sample]:
    """Without the groups whose rewards are all the same."""
    equal = equal_groups(samples)
    return [sample for sample in samples if not equal[sample.group]]


def with_advantages(batch: PackedBatch, samples: Seq[Sample], settings: AdvantageSettings) -> PackedBatch:
    """Add `advantage` [T], and `return` where `old_value` is there; 0 where the mask is False.

    A KL term in the reward is taken off every response token's reward, which needs `old_logprob` and
    `reference_logprob`. Without a critic the token penalties are summed into the response's reward. All is computed in
    float64: rewards may be large, and a group's differ little.
    """
    scores = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    owner = batch.sequence_ids
    rewards = terminal_rewards(scores, batch.mask, owner)
    if settings.kl_coef:
        fields = batch.fields
        kl = kl_estimate(fields["old_logprob"], fields["reference_logprob"], settings.kl_estimator)
        rewards = rewards - settings.kl_coef * torch.where(batch.mask, kl, 0.0)
    returns: dict[str, Tensor] = {}
    if settings.kind == "ppo":
        advantage, goal = gae(
            rewards, batch.fields["old_value"], batch.mask, owner, gamma=settings.gamma, lam=settings.lam
        )
        returns["return"] = goal.to(torch.float32)
    else:
        totals = rewards.new_zeros(batch.num_sequences).index_add(0, owner, rewards)
        groups = torch.tensor([sample.group for sample in samples])
        if settings.kind == "rloo":
            per_sample = leave_one_out(totals, groups)
        else:
            per_sample = group_relative(totals, groups, divide_by_std=settings.scale_by_std)
        advantage = torch.where(batch.mask, per_sample[owner], 0.0)
    if settings.normalize:
        advantage = whiten(advantage, batch.mask)
    return batch.with_fields(advantage=advantage.to(torch.float32), **returns)


def minibatches(batch: PackedBatch, count: int, seed: str) -> list[PackedBatch]:
    """The sequences of `batch` shuffled and dealt into `count` parts, none empty; in order where it is one."""
    if count == 1:
        return [batch]
    order = list(range(batch.num_sequences))
    random.Random(seed).shuffle(order)
    parts = [sorted(order[i::count]) for i in range(count)]
    return [batch.select(part) for part in parts if part]
