"""One step of SFT or RL: rows or samples to a batch, and updates on it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.engine.native import Engine
from dovetail.launch.progress import Progress
from dovetail.rl.collect import SampleCollector, step_rows
from dovetail.rl.correction import importance_weights, lag_metrics, mismatch
from dovetail.rl.experience import (
    OwnAdvantage,
    minibatches,
    mismatch_metrics,
    pack_samples,
    routed,
    score_old,
    with_advantages,
)
from dovetail.rl.losses import weight_fields
from dovetail.rl.samples import Sample
from dovetail.rl.step_metrics import EMPTY_UPDATE, Row, Work, length_metrics, update_metrics

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import AnyRL
    from dovetail.recipe.schema import Recipe


def inner_batches(batch: PackedBatch, recipe: "Recipe", step: int) -> Iterator[PackedBatch]:
    """Yields the batch of each optimizer step."""
    algorithm = recipe.algorithm
    for epoch in range(algorithm.epochs):
        yield from minibatches(
            batch, algorithm.num_mini_batches, f"{recipe.trainer.seed}/{step}/{epoch}"
        )


def weighted(batch: PackedBatch, recipe: "Recipe") -> PackedBatch:
    longest = float(recipe.rollout.max_new_tokens)
    algorithm = recipe.algorithm
    assert hasattr(algorithm, "aggregation")
    return batch.with_fields(**weight_fields(batch, algorithm.aggregation, longest))


@dataclass(kw_only=True)
class Task:
    recipe: "Recipe"
    policy: Engine
    progress: Progress = field(default_factory=Progress)

    @property
    def trained(self) -> list[Engine]:
        return [self.policy]

    def sample_rows(self) -> list[dict[str, Any]]:
        return []


def lengths_of(batch: PackedBatch) -> Row:
    """Metrics of rows with completions."""
    trained = [int(mask.sum()) for mask in batch.mask.split(batch.lengths)]
    prompts = [n - own for n, own in zip(batch.lengths, trained, strict=True)]
    return {
        **length_metrics("prompt_length", prompts),
        **length_metrics("response_length", trained),
    }


@dataclass(kw_only=True)
class RowsTask(Task):
    """Trains on rows, and evaluates them, as they are. first_row, parts: as `step_rows`."""

    rows: Seq[Any]
    held_out: Seq[Any]
    eval_sets: Mapping[str, Seq[Any]] = field(default_factory=dict)
    first_row: int = 0
    parts: Seq[tuple[int, float]] = ()

    def rows_of(self, step: int) -> list[Any]:
        """Returns the rows of a step."""
        numbers = step_rows(self.recipe, len(self.rows), step, self.first_row, self.parts)
        return [self.rows[number] for number in numbers]

    def measure(self, name: str, rows: Seq[Any]) -> Row:
        """Metrics of the set `name` ("": held_out)."""
        raise NotImplementedError

    def evaluate(self, step: int) -> Row:
        row: Row = {}
        for name, rows in {"": self.held_out, **self.eval_sets}.items():
            if rows:
                self.progress.phase("eval", step)
                prefix = f"eval/{name}/" if name else "eval_"
                row |= {
                    f"{prefix}{metric}": value for metric, value in self.measure(name, rows).items()
                }
        return row


@dataclass(kw_only=True)
class SupervisedTask(RowsTask):
    loss: LossFn

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        self.progress.phase("update", step + 1)
        rows = self.rows_of(step)
        batch = weighted(PackedBatch.pack(rows), self.recipe)
        reports = [
            self.policy.train_step(part, self.loss)
            for part in inner_batches(batch, self.recipe, step)
        ]
        work = {
            "update": (
                len(batch) * self.recipe.algorithm.epochs,
                len(rows) * self.recipe.algorithm.epochs,
            )
        }
        return {**update_metrics(reports), "tokens": len(batch), **lengths_of(batch), "work": work}

    def measure(self, name: str, rows: Seq[Sequence]) -> Row:
        batch = PackedBatch.pack(rows)
        return {
            "loss": -float(self.policy.score(batch).logprob.sum()) / max(int(batch.mask.sum()), 1)
        }


@dataclass(kw_only=True)
class RLTask(Task):
    """advantage: in place of the algorithm's."""

    collector: SampleCollector
    policy_loss: LossFn
    critic: Engine | None = None
    value_loss: LossFn | None = None
    reference: Engine | None = None
    advantage: OwnAdvantage | None = None

    def sample_rows(self) -> list[dict[str, Any]]:
        return self.collector.sample_rows()

    def evaluate(self, step: int) -> Row:
        return self.collector.evaluate(step)

    @property
    def trained(self) -> list[Engine]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def needs_old_logprobs(self) -> bool:
        correction = self.recipe.correction
        own = cast("AnyRL", self.recipe.algorithm).needs_old_logprobs
        if correction is None or self.recipe.weighs_in_update:
            return own
        return correction.old == "recomputed"

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        self.progress.phase("push", step + 1)
        self.collector.push()
        found = self.collector.collect(step, stopping)
        if found is None:
            return None
        samples, row = found
        if not samples:
            return {**row, **EMPTY_UPDATE}
        self.progress.phase("wait")
        if stopping():
            return None
        self.progress.phase("score")
        batch, distances = self._prepare(samples, step)
        self.progress.phase("wait")
        if stopping():
            return None
        work = row.pop("work") | self._work(batch)
        update = self._update(batch, step) if batch.num_sequences else {}
        return {**row, **EMPTY_UPDATE, **update, **distances, "work": work}

    def _work(self, batch: PackedBatch) -> Work:
        tokens = len(batch)
        samples = batch.num_sequences
        epochs = self.recipe.algorithm.epochs
        scored = {"old_logprob", "reference_logprob", "old_value"} & set(batch.fields)
        if not self.needs_old_logprobs and self.recipe.rollout.router_replay != "trainer":
            scored -= {"old_logprob"}
        score = {"score": (tokens * len(scored), samples * len(scored))} if scored else {}
        return {**score, "update": (tokens * epochs, samples * epochs)}

    def _update(self, batch: PackedBatch, step: int) -> Row:
        algorithm = self.recipe.algorithm
        warmup = algorithm.critic_warmup if algorithm.name == "ppo" else 0
        policy_reports = []
        critic_reports = []
        for part in inner_batches(batch, self.recipe, step):
            if step >= warmup:
                policy_reports.append(self.policy.train_step(part, self.policy_loss))
            if self.critic is not None and self.value_loss is not None:
                critic_reports.append(
                    self.critic.train_step(part.with_routing(None), self.value_loss)
                )
        found = update_metrics(policy_reports)
        absent = [
            name for name, value in found.items() if "mismatch" in name and math.isnan(value)
        ]  # no such tokens
        row = {
            **{name: value for name, value in found.items() if name not in absent},
            "tokens": len(batch),
        }
        if "approx_kl" in row:
            row.setdefault("kl_mean", row["approx_kl"])  # without a reference
        if critic_reports:
            critic = update_metrics(critic_reports)
            flops = row.get("flops", 0.0) + critic.pop("flops")
            row |= {**{f"critic_{name}": value for name, value in critic.items()}, "flops": flops}
            if "skipped" in critic:
                row = {"skipped": True, "fault": f"the critic's update: {critic['fault']}", **row}
        return row

    def _prepare(self, samples: Seq[Sample], step: int) -> tuple[PackedBatch, Row]:
        """The batch to train on, and metrics of the mismatch."""
        algorithm = cast("AnyRL", self.recipe.algorithm)
        rollout = self.recipe.rollout
        correction = self.recipe.correction
        dropped = frozenset[int]()
        version = (
            None if self.recipe.trainer.max_lag is None else step
        )  # asynchronous: versions are steps
        batch = pack_samples(samples, rollout.temperature, version)
        metrics: Row = lag_metrics(batch)
        if rollout.mismatch_metrics:
            metrics |= mismatch_metrics(self.policy, batch, rollout.router_replay)
        if self.needs_old_logprobs or rollout.router_replay == "trainer":
            batch = score_old(self.policy, batch, rollout.router_replay)
        else:
            batch = routed(batch, rollout.router_replay)
        if correction is not None and correction.old == "sampler":
            batch = batch.with_fields(old_logprob=batch.fields["rollout_logprob"])
        elif correction is not None and not self.recipe.weighs_in_update:
            assert correction.ratio != "none"
            weights, dropped, shares = importance_weights(
                batch, ratio=correction.ratio, bounds=correction.bounds, outside=correction.outside
            )
            metrics = mismatch(batch, batch.fields["old_logprob"]) | metrics | shares
            batch = batch.with_fields(rollout_weight=weights)
        if self.reference is not None:
            batch = batch.with_fields(
                reference_logprob=self.reference.score(batch.with_routing(None)).logprob
            )
        if self.critic is not None:
            batch = batch.with_fields(old_value=self.critic.values(batch.with_routing(None)))
        batch = with_advantages(
            batch, samples, algorithm, self.advantage
        )  # of dropped samples, too
        kept = [i for i in range(batch.num_sequences) if i not in dropped]
        return weighted(batch.select(kept) if dropped else batch, self.recipe), metrics
