"""Router replay in RL: whose routes the policy's passes take, and how far the policy is from what was sampled.

none      every pass routes for itself
trainer   (R2) the update takes the routes of the pass that scored the old log-probs
rollout   (R3) that pass and the update take the routes of the sampler
"""

from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import RoutingTrace
from dovetail.engine.base import Engine
from dovetail.errors import DataError
from dovetail.rl.losses import kl_estimate

Replay = Literal["none", "trainer", "rollout"]
P99 = 0.99


def score_old(policy: Engine, batch: PackedBatch, replay: Replay) -> PackedBatch:
    """`batch` with `old_logprob`, scored along the routes that `replay` says and that the update is to take.

    The batch brings the sampler's routes, where it told them.
    """
    routes: RoutingTrace | None = None
    if replay == "trainer":
        stats, routes = policy.score_and_trace(batch.with_routing(None))
    else:
        batch = routed(batch, replay)
        stats, routes = policy.score(batch), batch.routing
    return batch.with_fields(old_logprob=stats.logprob).with_routing(routes)


def routed(batch: PackedBatch, replay: Replay) -> PackedBatch:
    """`batch` with the sampler's routes where the policy is to take them, else with none. Raises where they are missing."""
    if replay != "rollout":
        return batch.with_routing(None)
    if batch.routing is None:
        raise DataError("rollout.replay=rollout, but the sampler told no routes; set rollout.backend=native")
    return batch


def monitor(policy: Engine, batch: PackedBatch, replay: Replay) -> dict[str, float]:
    """How far the policy is from the sampler along its own routes, and along the sampler's where it replays them."""
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
    """How far log-probs are from those that the sampler drew from: |d| by mean and 99th percentile, and k3 (Schulman 2020)."""
    sampled, scored = batch.fields["rollout_logprob"][batch.mask], stats.logprob[batch.mask]
    if not len(scored):
        return {}
    distance = (scored - sampled).abs()
    found: dict[str, Tensor] = {
        "mean": distance.mean(),
        "p99": distance.quantile(P99) if len(distance) < 1 << 24 else distance.max(),  # torch's most
        "k3": kl_estimate(sampled, scored, "k3").mean(),
    }
    return {f"{prefix}mismatch_{name}": float(value) for name, value in found.items()}


def write_routes(path: Path, traces: Seq[RoutingTrace | None]) -> None:
    """Write the routes of a step's samples as one safetensors file, in the narrowest type; nothing where there are none.

    indices [tokens, layers, K]; valid [tokens]; starts [samples + 1]: where each sample's tokens begin; layers: the numbers
    of the layers in the model.
    """
    known = [trace for trace in traces if trace is not None]
    if not known:
        return
    whole = RoutingTrace.cat(known)
    last = int(whole.indices.max()) if whole.indices.numel() else 0
    narrow = torch.uint8 if last < 1 << 8 else torch.uint16 if last < 1 << 16 else torch.int32
    starts = torch.tensor([0, *map(len, known)]).cumsum(0)
    layers = torch.tensor(whole.layers)
    tensors = {"indices": whole.indices.to(narrow), "valid": whole.valid, "starts": starts, "layers": layers}
    path.write_bytes(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def read_routes(path: Path) -> list[RoutingTrace]:
    """What `write_routes` wrote: a trace a sample."""
    found = load_file(path)
    layers = tuple(found["layers"].tolist())
    return [
        RoutingTrace(layers, found["indices"][a:b].to(torch.int32), found["valid"][a:b])
        for a, b in pairwise(found["starts"].tolist())
    ]
