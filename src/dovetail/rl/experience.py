"""Samples to a batch with the fields of a loss."""

import random
from collections.abc import Mapping, Sequence as Seq
from typing import Literal

from dovetail.batch.balancing import split_units
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.engine.native import Engine
from dovetail.errors import DataError
from dovetail.rl.correction import mismatch
from dovetail.rl.samples import Sample
from dovetail.sampler.turn import Turn

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
