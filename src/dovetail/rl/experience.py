"""Samples to a batch with the fields of a loss."""

import random
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dovetail.batch.balancing import split_units
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.batch.packing import kind_of
from dovetail.engine.native import Engine
from dovetail.errors import ConfigError, DataError
from dovetail.kernels.reference import sum_rows, widened
from dovetail.rl.advantages import gae, group_relative, leave_one_out, terminal_rewards, whiten
from dovetail.rl.correction import mismatch
from dovetail.rl.losses import kl_estimate
from dovetail.rl.samples import Sample
from dovetail.sampler.turn import Turn

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import AnyRL


OwnAdvantage = Callable[
    [Tensor, Tensor, PackedBatch], Any
]  # of rewards [S] and groups [S]; returns [S] or [T]
# Routes of the update: new ones, those of the scoring pass (R2), those of the sampler (R3).
Replay = Literal["none", "trainer", "rollout"]


def pack_samples(
    samples: Seq[Sample], temperature: float, version: int | None = None
) -> PackedBatch:
    """Packs samples with the field `rollout_logprob`, and with `lag` if completions name versions.

    version: that which `lag` is behind; None: the newest.
    """
    named = [own for sample in samples for own, _, _ in sample.completion.versions]
    newest = max(named, default=0) if version is None else version
    shared: Mapping[str, float] = {} if temperature in (0.0, 1.0) else {"temperature": temperature}
    rows = []
    for sample in samples:
        prompt = sample.prompt.ids
        turn = sample.completion
        log_probs: Seq[float] = [0.0] * len(prompt) + list(turn.log_probs)
        fields: Mapping[str, float | Seq[float]] = {**shared, "rollout_logprob": log_probs}
        if named:
            fields = {**fields, "lag": [0.0] * len(prompt) + lags(turn, newest)}
        mask = [False] * len(prompt) + [*turn.mask]
        rows.append(Sequence([*prompt, *turn.ids], mask, fields, sample.prompt.media, turn.routing))
    return PackedBatch.pack(rows)


def lags(turn: Turn, version: int) -> list[float]:
    """`version` minus that of each id; 0 where none is named."""
    found = [0.0] * len(turn.ids)
    for own, start, end in turn.versions:
        if not (0 <= start <= end <= len(found) and own <= version):
            tokens = f"{len(found)} tokens up to version {version}"
            raise DataError(f"versions {turn.versions} are not those of {tokens}")
        found[start:end] = [float(version - own)] * (end - start)
    return found


def with_advantages(
    batch: PackedBatch, samples: Seq[Sample], algorithm: "AnyRL", own: OwnAdvantage | None = None
) -> PackedBatch:
    """Add `advantage` [T], and for PPO `return` [T]. REINFORCE++: Hu et al. 2025, eqs. 6 to 9."""
    scores = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    owner = batch.sequence_ids
    rewards = terminal_rewards(scores, batch.mask, owner)
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        fields = batch.fields
        kl = kl_estimate(fields["old_logprob"], fields["reference_logprob"], algorithm.kl_estimator)
        rewards = rewards - algorithm.kl_coef * torch.where(batch.mask, kl, 0.0)
    returns: dict[str, Tensor] = {}
    totals = sum_rows(rewards, owner, batch.num_sequences)
    groups = torch.tensor([sample.group for sample in samples])
    if own is not None:
        advantage = own_advantages(own, totals, groups, batch)
    elif algorithm.name == "ppo":
        values = batch.fields["old_value"]
        advantage, target = gae(
            rewards, values, batch.mask, owner, gamma=algorithm.gamma, lam=algorithm.lam
        )
        returns["return"] = target.to(torch.float32)
    elif algorithm.name == "reinforce_plus_plus" and not algorithm.group_baseline:
        advantage, _ = gae(
            rewards, torch.zeros_like(rewards), batch.mask, owner, gamma=algorithm.gamma
        )
    elif algorithm.name == "rloo":
        advantage = torch.where(batch.mask, leave_one_out(totals, groups)[owner], 0.0)
    else:
        scale = algorithm.name == "grpo" and algorithm.scale_by_std
        advantage = torch.where(
            batch.mask, group_relative(totals, groups, divide_by_std=scale)[owner], 0.0
        )
    if algorithm.normalize_advantage:
        advantage = whiten(advantage, batch.mask)
    return batch.with_fields(advantage=advantage.to(torch.float32), **returns)


def own_advantages(
    own: OwnAdvantage, rewards: Tensor, groups: Tensor, batch: PackedBatch
) -> Tensor:
    result = own(rewards, groups, batch)
    if isinstance(result, Tensor) and result.shape == rewards.shape:
        result = result[batch.sequence_ids]
    if not isinstance(result, Tensor) or result.shape != batch.mask.shape:
        wanted = f"a number for each response, [{len(rewards)}], or token, [{len(batch)}]"
        raise ConfigError(f"the advantage is {kind_of(result)}; expected {wanted}")
    return torch.where(batch.mask, widened(result.detach()), 0.0)


def minibatches(batch: PackedBatch, count: int, seed: str) -> list[PackedBatch]:
    """Shuffled parts of whole groups, none empty."""
    if count == 1:
        return [batch]
    units = split_units(batch.num_sequences, batch.groups)
    random.Random(seed).shuffle(units)
    parts = [sorted(s for unit in units[i::count] for s in unit) for i in range(count)]
    return [batch.select(part) for part in parts if part]


def score_old(policy: Engine, batch: PackedBatch, replay: Replay) -> PackedBatch:
    """Returns the batch with `old_logprob` and the routes of the update."""
    batch = routed(batch, replay)
    if replay == "trainer":
        stats, routes = policy.score_and_trace(batch)
        batch = batch.with_routing(routes)
    else:
        stats = policy.score(batch)
    return batch.with_fields(old_logprob=stats.logprob)


def routed(batch: PackedBatch, replay: Replay) -> PackedBatch:
    if replay != "rollout":
        return batch.with_routing(None)
    if batch.routing is None:
        raise DataError(
            "rollout.router_replay=rollout, but the sampler returns no routes; set "
            "rollout.backend=native"
        )
    return batch


def mismatch_metrics(policy: Engine, batch: PackedBatch, replay: Replay) -> dict[str, float]:
    """Along the policy's own routes; for `rollout` along the sampler's, too."""
    if batch.routing is None:
        metrics = mismatch(batch, policy.score(batch).logprob)
    else:
        stats, own = policy.score_and_trace(batch.with_routing(None))
        metrics = {
            **mismatch(batch, stats.logprob),
            "route_agreement": own.agreement(batch.routing),
        }
    if replay == "rollout":
        metrics |= mismatch(batch, policy.score(batch).logprob, "replayed_")
    return metrics
