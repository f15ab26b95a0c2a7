"""Importance weights of samples, and the mismatch of sampler and policy."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import sum_rows, widened
from dovetail.rl.losses import LOG_RATIO_LIMIT, bounded, kl_estimate

P99 = 0.99
QUANTILE_LIMIT = 1 << 24  # elements that torch.quantile takes


class Weights(NamedTuple):
    token: Tensor  # [T], 1 outside the mask
    dropped: frozenset[int]  # sequences
    metrics: dict[str, float]


def importance_weights(
    batch: PackedBatch,
    *,
    ratio: Literal["token", "sequence", "geometric"] = "token",
    bounds: tuple[float, float] = (0.0, 2.0),
    outside: Literal["clamp", "mask", "drop"] = "clamp",
) -> Weights:
    """r = p_old / p_sampler of a token, or a sequence's product or geometric mean, for `PolicyLoss`. Outside `bounds`:

        clamp   the nearest bound: truncated importance sampling (Ionides 2008; Yao et al. 2025)
        mask    0, still counted: IcePop by token (Ling Team 2025), MIS by sequence (Liu et al. 2025)
        drop    the response is left out
    With p / p_old this is decoupled PPO (Hilton et al. 2022; Fu et al. 2025).
    """
    where = batch.mask.nonzero().flatten()
    owner = batch.sequence_ids[where]
    logs = widened(batch.fields["old_logprob"])[where] - batch.fields["rollout_logprob"][where]
    unit = torch.arange(len(where), device=where.device)
    if ratio != "token":
        _, unit = owner.unique(return_inverse=True)
    sizes = torch.bincount(unit)
    total = sum_rows(logs, unit, len(sizes))
    r = (
        (total / sizes if ratio == "geometric" else total)
        .clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        .exp()
    )
    weight, inside = bounded(r, bounds, outside)
    token = torch.ones_like(batch.mask, dtype=weight.dtype)
    token[where] = weight[unit]
    dropped = frozenset(owner[~inside[unit]].tolist()) if outside == "drop" else frozenset[int]()
    metrics = (
        {"correction_dropped": len(dropped) / max(batch.num_sequences, 1)}
        if outside == "drop"
        else {}
    )
    if len(r):
        effective = weight.sum() ** 2 / (weight * weight).sum().clamp(
            min=torch.finfo(weight.dtype).tiny
        )
        metrics |= {
            "correction_outside": float((~inside).to(weight.dtype).mean()),
            "correction_weight": float(weight.mean()),
            "correction_sample_size": float(effective) / len(r),
        }
    return Weights(token, dropped, metrics)


def lag_metrics(batch: PackedBatch) -> dict[str, float]:
    lag = batch.fields["lag"][batch.mask] if "lag" in batch.fields else batch.tokens[:0]
    return {"lag_mean": float(lag.mean()), "lag_max": float(lag.max())} if len(lag) else {}


def mismatch(batch: PackedBatch, logprob: Tensor, prefix: str = "") -> dict[str, float]:
    """|log-prob difference| of policy and sampler, and k3 of KL(sampler || policy); `stale_`: of tokens with a lag."""
    lag = batch.fields.get("lag", torch.zeros_like(logprob))
    metrics = dict[str, Any]()
    for age, chosen in (("", batch.mask & (lag <= 0)), ("stale_", batch.mask & (lag > 0))):
        sampled = batch.fields["rollout_logprob"][chosen]
        scored = logprob[chosen]
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
