"""The policy-gradient loss, and how losses of tokens are aggregated."""

from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError
from dovetail.kernels.reference import count_rows, sum_rows, widened
from dovetail.nn.heads import is_separable
from dovetail.rl.custom import CustomLoss, custom_losses

Aggregation = Literal["token", "sequence", "sequence_sum"]
KLEstimator = Literal["k1", "k2", "k3"]
Term = Literal["ppo", "cispo", "gmpo", "sapo"]

LOG_RATIO_LIMIT = 20.0  # nats


def weight_fields(
    batch: PackedBatch, aggregation: Aggregation, constant: float = 1.0
) -> dict[str, Tensor]:
    """Fields `weight` and `count` [T]; loss = sum(weight x token loss) / sum(count).

    token         mean over tokens: DAPO (Yu et al. 2025, eq. 8)
    sequence      mean of sequences' means: GRPO (Shao et al. 2024, eq. 3)
    sequence_sum  mean of sequences' sums / `constant`: Dr. GRPO (Liu et al. 2025, section 3.2)
    """
    mask = batch.mask
    owner = batch.sequence_ids
    dtype = reduce(torch.promote_types, (x.dtype for x in batch.fields.values()), torch.float32)
    ones = mask.to(dtype)
    if aggregation == "token":
        return {"weight": ones, "count": ones}
    rank = ones.to(torch.int64).cumsum(0) - 1  # among counted tokens
    sizes = torch.bincount(owner[mask], minlength=batch.num_sequences)
    first = mask & (rank == (sizes.cumsum(0) - sizes)[owner])
    share = (
        1.0 / sizes.clamp(min=1).to(dtype)[owner] if aggregation == "sequence" else 1.0 / constant
    )
    return {"weight": ones * share, "count": first.to(dtype)}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """l = w term + kl_coef KL(policy, reference) - entropy_coef H.

    w: `fields["rollout_weight"]`, else 1; with `sampler_bounds` sg(p) / p_sampler of `fields["rollout_logprob"]`, for the only
    update of a batch; `outside`: the bounds. A: `fields["advantage"]`. r = p / p_old of `fields["old_logprob"]`, without it 1.
        ppo     max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)): Schulman et al. 2017, eq. 7; DAPO (Yu et al. 2025, eq. 10).
                dual_clip c: at most -A c where A < 0 (Ye et al. 2020, eq. 5)
        cispo   -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p: MiniMax 2025, eqs. 4 and 5; the paper's clip_low is 1
        gmpo    -A exp(mean of log r, clipped to [-clip_low, clip_high] where that is worse): Zhao et al. 2025, eq. 4
        sapo    -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: Gao et al. 2025, eqs. 5 and 6
    ratio="sequence": r = exp(mean log ratio of the sequence), GSPO (Zheng et al. 2025, eqs. 5-7).
    """

    term: Term = "ppo"
    custom: CustomLoss | None = None  # in place of the term
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    ratio: Literal["token", "sequence"] = "token"
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    sampler_bounds: tuple[float, float] | None = None
    outside: Literal["clamp", "mask"] = "clamp"

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            clips = f"clip_low={self.clip_low}, clip_high={self.clip_high}"
            raise ConfigError(
                f"{clips}: expected 0 <= clip_low <= 1 and clip_high >= 0, as in clip_low: 0.2"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(
                f"dual_clip={self.dual_clip} must be above 1; 3.0 is usual, null turns it off"
            )

    @property
    def separable(self) -> bool:
        if self.custom is not None:
            return is_separable(self.custom)
        return self.ratio == "token" and self.term != "gmpo"

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        if self.custom is not None:
            loss, metrics = custom_losses(self.custom, stats, batch)
        else:
            loss, metrics = self._term(logprob, batch)
        if self.sampler_bounds is not None:
            weight, more = self._weight(logprob.detach(), batch, self.sampler_bounds)
            loss = weight * loss
            metrics = {**metrics, **more}
        elif "rollout_weight" in batch.fields:
            loss = batch.fields["rollout_weight"] * loss
        metrics["entropy_mean"] = Sum.of(stats.entropy)
        if "reference_logprob" in batch.fields:
            divergence = kl_estimate(logprob, batch.fields["reference_logprob"], self.kl_estimator)
            metrics["kl_mean"] = Sum.of(divergence)
            if self.kl_coef:
                loss = loss + self.kl_coef * divergence
        elif self.kl_coef:
            raise ConfigError(
                f"kl_coef={self.kl_coef} needs the field reference_logprob: score a reference or "
                "set 0"
            )
        if self.entropy_coef:
            loss = loss - self.entropy_coef * widened(stats.entropy)
        return Loss(*aggregate(loss, batch), metrics)

    def _weight(
        self, logprob: Tensor, batch: PackedBatch, bounds: tuple[float, float]
    ) -> tuple[Tensor, dict[str, Sum]]:
        """[T], with the metrics of `rl/correction.py` that are means over tokens."""
        sampled = batch.fields["rollout_logprob"]
        weight, inside = bounded(_limited(logprob - sampled).exp(), bounds, self.outside)
        metrics = {"correction_outside": Sum.of(~inside), "correction_weight": Sum.of(weight)}
        lag = batch.fields.get("lag")
        ages = {"": None} if lag is None else {"": lag <= 0, "stale_": lag > 0}
        for age, chosen in ages.items():
            metrics[f"{age}mismatch_mean"] = Sum.of((logprob - sampled).abs(), chosen)
            metrics[f"{age}mismatch_k3"] = Sum.of(kl_estimate(sampled, logprob, "k3"), chosen)
        return weight, metrics

    def _term(self, logprob: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Sum]]:
        advantage = batch.fields["advantage"]
        token_log_ratio = _limited(logprob - batch.fields.get("old_logprob", logprob.detach()))
        log_ratio = (
            token_log_ratio if self.ratio == "token" else _sequence_mean(token_log_ratio, batch)
        )
        if self.term == "gmpo":
            near = log_ratio.clamp(-self.clip_low, self.clip_high)
            worse = torch.where(
                advantage > 0, torch.minimum(log_ratio, near), torch.maximum(log_ratio, near)
            )
            clipped = worse != log_ratio
            log_ratio = _sequence_mean(worse, batch)
            advantage = _sequence_mean(advantage, batch)
        ratio = log_ratio.exp()
        near = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        extra: dict[str, Sum] = {}
        if self.term == "ppo":
            unclipped = -advantage * ratio
            bounded = -advantage * near
            loss = torch.maximum(unclipped, bounded)
            clipped = bounded > unclipped
            if self.dual_clip is not None:
                bound = -advantage * self.dual_clip
                capped = (advantage < 0) & (loss > bound)
                loss = torch.where(capped, bound, loss)
                extra = {"dual_clip_fraction": Sum.of(capped)}
        elif self.term == "cispo":
            loss = -near.detach() * advantage * logprob
            clipped = near != ratio
        elif self.term == "gmpo":
            loss = -advantage * ratio
        else:
            positive = torch.full_like(ratio, self.tau_positive)
            negative = torch.full_like(ratio, self.tau_negative)
            tau = torch.where(advantage > 0, positive, negative)
            loss = -advantage * (4 / tau) * torch.sigmoid(tau * (ratio - 1))
            clipped = torch.zeros_like(ratio)
        return loss, {
            "clip_fraction": Sum.of(clipped),
            "approx_kl": Sum.of(_k3(-token_log_ratio)),
            "ratio_mean": Sum.of(ratio),
            "ratio_deviation": Sum.of((ratio - 1).abs()),
            **extra,
        }


def kl_estimate(logprob: Tensor, reference: Tensor, kind: KLEstimator) -> Tensor:
    """KL(policy || reference) by token (Schulman 2020): k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d, with d = log p - log p_ref.

    In a loss, k1's expected gradient is 0, k2's that of KL(policy || reference), k3's of KL(reference || policy).
    """
    difference = _limited(widened(logprob) - reference)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference * difference / 2
    if kind == "k3":
        return _k3(difference)
    raise ConfigError(f"kl_estimator={kind!r} is no KL estimator; choose k1, k2 or k3")


def bounded(
    ratio: Tensor, bounds: tuple[float, float], outside: Literal["clamp", "mask", "drop"]
) -> tuple[Tensor, Tensor]:
    """Weights, and which ratios are within the bounds."""
    inside = (bounds[0] <= ratio) & (ratio <= bounds[1])
    return ratio.clamp(*bounds) if outside == "clamp" else torch.where(inside, ratio, 0.0), inside


def _k3(difference: Tensor) -> Tensor:
    return torch.expm1(-difference) + difference


def _limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sequence_mean(x: Tensor, batch: PackedBatch) -> Tensor:
    owner = batch.sequence_ids
    sizes = count_rows(owner, batch.num_sequences).clamp(min=1)
    return (sum_rows(x, owner, batch.num_sequences) / sizes)[owner]


def aggregate(token_loss: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The sum and the count of a loss [T], by the fields of `weight_fields`."""
    ones = torch.ones_like(token_loss.detach())
    weight = batch.fields.get("weight", ones)
    count = batch.fields.get("count", ones)
    return (weight * token_loss).sum(), count.sum()
