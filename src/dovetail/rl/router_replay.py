"""Router replay and the distance of the policy from the sampler.

none: every pass routes for itself. trainer (R2): the update uses the routes of the pass that scored old log-probs.
rollout (R3): that pass and the update use the sampler's routes.
"""

from typing import Literal

from torch import Tensor

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import RoutingTrace
from dovetail.engine.base import Engine
from dovetail.errors import DataError
from dovetail.rl.losses import kl_estimate

Replay = Literal["none", "trainer", "rollout"]
P99 = 0.99
QUANTILE_LIMIT = 1 << 24  # elements that torch.quantile takes


def score_old(policy: Engine, batch: PackedBatch, replay: Replay) -> PackedBatch:
    """Add `old_logprob` and the routes of the update."""
    routes: RoutingTrace | None = None
    if replay == "trainer":
        stats, routes = policy.score_and_trace(batch.with_routing(None))
    else:
        batch = routed(batch, replay)
        stats, routes = policy.score(batch), batch.routing
    return batch.with_fields(old_logprob=stats.logprob).with_routing(routes)


def routed(batch: PackedBatch, replay: Replay) -> PackedBatch:
    """With the sampler's routes for `rollout`, else with none."""
    if replay != "rollout":
        return batch.with_routing(None)
    if batch.routing is None:
        raise DataError("rollout.router_replay=rollout, but the sampler returns no routes; set rollout.backend=native")
    return batch


def mismatch_metrics(policy: Engine, batch: PackedBatch, replay: Replay) -> dict[str, float]:
    """Along the policy's own routes, and for `rollout` along the sampler's."""
    metrics: dict[str, float] = {}
    if batch.routing is None:
        metrics |= mismatch(batch, policy.score(batch), "")
    else:
        stats, own = policy.score_and_trace(batch.with_routing(None))
        metrics |= {**mismatch(batch, stats, ""), "route_agreement": own.agreement(batch.routing)}
    if replay == "rollout":
        metrics |= mismatch(batch, policy.score(batch), "replayed_")
    return metrics


def mismatch(batch: PackedBatch, stats: TokenStats, prefix: str) -> dict[str, float]:
    """|log-prob difference| by mean and 99th percentile; k3 of KL(sampler || policy)."""
    sampled, scored = batch.fields["rollout_logprob"][batch.mask], stats.logprob[batch.mask]
    if not len(scored):
        return {}
    distance = (scored - sampled).abs()
    metrics: dict[str, Tensor] = {
        "mean": distance.mean(),
        "p99": distance.quantile(P99) if len(distance) < QUANTILE_LIMIT else distance.max(),
        "k3": kl_estimate(sampled, scored, "k3").mean(),
    }
    return {f"{prefix}mismatch_{name}": float(value) for name, value in metrics.items()}
