"""Planted defects of an RL step, each one that has been seen in the field: a golden test must fail on every one.

Those of `LAYOUT_BUGS` show on several ranks only.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.optim import optimizer
from dovetail.optim.optimizer import Shard
from dovetail.parallel.mesh import Mesh
from dovetail.rl import experience, losses, tasks
from dovetail.rl.algorithms.policy_gradient import RLAlgorithm
from dovetail.rl.samples import Sample

pack_samples, with_advantages = experience.pack_samples, RLAlgorithm.with_advantages
PREPARE, POLICY_LOSS = tasks.RLTask.prepare, losses.PolicyLoss.__call__


def flipped_advantages(
    algorithm: RLAlgorithm, batch: PackedBatch, samples: Seq[Sample]
) -> PackedBatch:
    right = with_advantages(algorithm, batch, samples)
    return right.with_fields(advantage=-right.fields["advantage"])


def grouped_by_sample(
    algorithm: RLAlgorithm, batch: PackedBatch, samples: Seq[Sample]
) -> PackedBatch:
    """First samples of all prompts against each other, and so on: interleaved where it should be back to back."""
    regrouped = []
    for sample in samples:
        turn = sample.completion
        other = replace(turn, id=turn.id._replace(row=turn.id.sample))
        regrouped.append(replace(sample, completion=other))
    return with_advantages(algorithm, batch, regrouped)


def mask_late(samples: Seq[Sample], temperature: float, version: int | None = None) -> PackedBatch:
    """The response's first token left out and, in its place, the one after its last: the mask not shifted with targets."""
    right = pack_samples(samples, temperature, version)
    return right.with_mask(right.mask.roll(1))


def mask_early(samples: Seq[Sample], temperature: float, version: int | None = None) -> PackedBatch:
    right = pack_samples(samples, temperature, version)
    return right.with_mask(right.mask.roll(-1))


def no_temperature(
    samples: Seq[Sample], _temperature: float, version: int | None = None
) -> PackedBatch:
    return pack_samples(samples, 1.0, version)


def stale_scores(
    task: tasks.RLTask, samples: Seq[Sample], step: int
) -> tuple[PackedBatch, dict[str, Any]]:
    """Old log-probs of the policy that the run began with."""
    batch, metrics = PREPARE(task, samples, step)
    return batch.with_fields(old_logprob=batch.fields["reference_logprob"]), metrics


def shifted_scores(
    task: tasks.RLTask, samples: Seq[Sample], step: int
) -> tuple[PackedBatch, dict[str, Any]]:
    """Old log-probs one position off."""
    batch, metrics = PREPARE(task, samples, step)
    return batch.with_fields(old_logprob=batch.fields["old_logprob"].roll(1)), metrics


def kl_sign(self: losses.PolicyLoss, stats: TokenStats, batch: PackedBatch, /) -> Loss:
    return POLICY_LOSS(replace(self, kl_coef=-self.kl_coef), stats, batch)


def entropy_sign(self: losses.PolicyLoss, stats: TokenStats, batch: PackedBatch, /) -> Loss:
    return POLICY_LOSS(replace(self, entropy_coef=-self.entropy_coef), stats, batch)


def unsummed(shards: Iterable[Shard], _mesh: Mesh) -> None:
    """What each rank of tp has of the norms' gradients, left alone."""
    for shard in shards:
        shard.collect_grad()


def own_norm(shards: Iterable[Shard], _mesh: Mesh, _watched: object) -> Tensor:
    """The norm of this rank's pieces."""
    return (
        torch.stack(
            [shard.local.grad.square().sum() for shard in shards if shard.local.grad is not None]
        )
        .sum()
        .sqrt()
    )


BUGS: Mapping[str, tuple[Any, str, Callable[..., Any]]] = {
    "advantage sign": (RLAlgorithm, "with_advantages", flipped_advantages),
    "wrong groups": (RLAlgorithm, "with_advantages", grouped_by_sample),
    "mask one late": (tasks, "pack_samples", mask_late),
    "mask one early": (tasks, "pack_samples", mask_early),
    "no temperature in the update": (tasks, "pack_samples", no_temperature),
    "stale old log-probs": (tasks.RLTask, "prepare", stale_scores),
    "old log-probs one off": (tasks.RLTask, "prepare", shifted_scores),
    "KL sign": (losses.PolicyLoss, "__call__", kl_sign),
    "entropy sign": (losses.PolicyLoss, "__call__", entropy_sign),
}
LAYOUT_BUGS: Mapping[str, tuple[Any, str, Callable[..., Any]]] = {
    "tp=2": (optimizer, "reduce_partial", unsummed),
    "dp=2": (optimizer, "global_norm", own_norm),
}


@contextlib.contextmanager
def planted(bug: str) -> Iterator[None]:
    """The named defect for the length of a `with` block; "" plants none."""
    if not bug:
        yield
        return
    place, name, wrong = {**BUGS, **LAYOUT_BUGS}[bug]
    with mock.patch.object(place, name, wrong):
        yield
