"""A loss and an advantage of your own, for a recipe in the same directory:

algorithm:
  name: grpo
  num_mini_batches: 4
  loss: {import: "own_loss:truncated", options: {cap: 2.0}}
  advantage: {import: "own_loss:best_of_group"}
"""

from collections.abc import Mapping

import torch
from torch import Tensor

import dovetail as dt


def truncated(
    stats: dt.TokenStats, batch: dt.PackedBatch, cap: float = 2.0
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """-sg(min(p_old / p_sampler, cap)) x the clipped objective: truncated importance sampling (Yao et al. 2025).

    stats.logprob, stats.entropy and the fields have one number for each counted token. A number for each of them comes back,
    and metrics, of which the run writes means. `algorithm.aggregation` turns token losses into the loss of a step;
    kl_coef and entropy_coef add their terms.
    """
    old = batch.fields.get(
        "old_logprob", stats.logprob.detach()
    )  # the policy before this step's updates
    weight = (
        (old - batch.fields["rollout_logprob"]).exp().clamp(max=cap)
    )  # against what the sampler computed
    ratio = (stats.logprob - old).exp()
    advantage = batch.fields["advantage"]
    loss = -weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return loss, {"sampler_weight": weight, "ratio_mean": ratio}


truncated.separable = True  # type: ignore[attr-defined]  # a token's loss needs no other token: saves a pass of the head


def best_of_group(rewards: Tensor, groups: Tensor, _batch: dt.PackedBatch) -> Tensor:
    """1 for the best responses of a prompt, less a share for the others, so that each group sums to 0.

    rewards, groups: [S], one for each response of the step. [S] comes back, or a number for each token, [T].
    """
    advantage = torch.zeros_like(rewards)
    for group in groups.unique():
        mine = groups == group
        best = rewards[mine] == rewards[mine].max()
        advantage[mine] = best.to(rewards.dtype) - best.to(rewards.dtype).mean()
    return advantage
