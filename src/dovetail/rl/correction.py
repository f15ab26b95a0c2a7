"""Importance weights for completions whose sampler is not the policy that learns from them, and how far apart both are."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import widened
from dovetail.rl.losses import LOG_RATIO_LIMIT, bounded, kl_estimate

P99 = 0.99
QUANTILE_LIMIT = 1 << 24  # elements that torch.quantile takes


class Weights(NamedTuple):
    """token: [T], 1 where nothing is counted. dropped: sequences to leave out."""

    token: Tensor
    dropped: frozenset[int]
    metrics: dict[str, float]


def importance_weights(
    batch: PackedBatch,
    *,
    ratio: Literal["token", "sequence", "geometric"] = "token",
    bounds: tuple[float, float] = (0.0, 2.0),
    outside: Literal["clamp", "mask", "drop"] = "clamp",
) -> Weights:
    """r = p_old / p_sampler of `old_logprob` and `rollout_logprob`, float32 or wider: constants for `PolicyLoss`.

    ratio: of a token; sequence: the product over a response's tokens; geometric: their geometric mean. A response's tokens
    share the last two. Within `bounds` r is the weight. Beyond them:
        clamp   the nearest bound: truncated importance sampling (Ionides 2008; Yao et al. 2025, TIS)
        mask    0, and the token still counts: IcePop by token (Ling Team 2025), masked importance sampling by sequence (Liu
                et al. 2025, MIS)
        drop    its response is left out, and does not count
    With PPO's ratio p / p_old this is the decoupled objective (Hilton et al. 2022; Fu et al. 2025, AReaL).
    """
    where = batch.mask.nonzero().flatten()
    owner = batch.sequence_ids[where]
    logs = widened(batch.fields["old_logprob"])[where] - batch.fields["rollout_logprob"][where]
    unit = torch.arange(len(where), device=where.device)
    if ratio != "token":
        _, unit = owner.unique(return_inverse=True)
    sizes = torch.bincount(unit)
    total = logs.new_zeros(len(sizes)).index_add(0, unit, logs)
    r = (total / sizes if ratio == "geometric" else total).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight, inside = bounded(r, bounds, outside)
    token = torch.ones_like(batch.mask, dtype=weight.dtype)
    token[where] = weight[unit]
    dropped = frozenset(owner[~inside[unit]].tolist()) if outside == "drop" else frozenset[int]()
    metrics = {"correction_dropped": len(dropped) / max(batch.num_sequences, 1)} if outside == "drop" else {}
    if len(r):
        effective = weight.sum() ** 2 / (weight * weight).sum().clamp(min=torch.finfo(weight.dtype).tiny)
        metrics |= {
            "correction_outside": float((~inside).to(weight.dtype).mean()),
            "correction_weight": float(weight.mean()),
            "correction_sample_size": float(effective) / len(r),
        }
    return Weights(token, dropped, metrics)


def lag_metrics(batch: PackedBatch) -> dict[str, float]:
    """Versions between the update and its tokens; none where the sampler names no versions."""
    lag = batch.fields["lag"][batch.mask] if "lag" in batch.fields else batch.tokens[:0]
    return {"lag_mean": float(lag.mean()), "lag_max": float(lag.max())} if len(lag) else {}


def mismatch(batch: PackedBatch, logprob: Tensor, prefix: str = "") -> dict[str, float]:
    """|log-prob difference| of policy and sampler: mean, 99th percentile, maximum; k3 of KL(sampler || policy).

    `mismatch_*`: of tokens of the policy's own version (lag 0), the gap between engines; `stale_mismatch_*`: of older ones.
    """
    lag, metrics = batch.fields.get("lag", torch.zeros_like(logprob)), dict[str, Any]()
    for age, chosen in (("", batch.mask & (lag <= 0)), ("stale_", batch.mask & (lag > 0))):
        sampled, scored = batch.fields["rollout_logprob"][chosen], logprob[chosen]
        if not len(scored):
            continue
        distance = (scored - sampled).abs()
        found: dict[str, Tensor] = {
            "mean": distance.mean(),
            "p99": distance.quantile(P99) if len(distance) < QUANTILE_LIMIT else distance.max(),
            "max": distance.max(),
            "k3": kl_estimate(sampled, scored, "k3").mean(),
        }
        metrics |= {f"{prefix}{age}mismatch_{name}": float(value) for name, value in found.items()}
    return metrics
