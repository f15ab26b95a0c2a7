"""One step of SFT or RL: rows or samples to a batch, and updates on it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.engine.base import StepReport
from dovetail.engine.native import Engine
from dovetail.launch.progress import Progress
from dovetail.rl.algorithms.policy_gradient import RLAlgorithm
from dovetail.rl.algorithms.sft import SFT
from dovetail.rl.collect import SampleCollector, step_rows
from dovetail.rl.correction import importance_weights, lag_metrics, mismatch
from dovetail.rl.experience import minibatches, mismatch_metrics, pack_samples, routed, score_old
from dovetail.rl.losses import weight_fields
from dovetail.rl.samples import Sample
from dovetail.rl.step_metrics import EMPTY_UPDATE, Row, Work, length_metrics, update_metrics

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import AggregatedSection
    from dovetail.recipe.schema import Recipe

SCORED_FIELDS = ("old_logprob", "reference_logprob", "old_value")


def inner_batches(batch: PackedBatch, recipe: "Recipe", step: int) -> Iterator[PackedBatch]:
    """Yields the batch of each optimizer step."""
    algorithm = recipe.algorithm
    for epoch in range(algorithm.epochs):
        seed = f"{recipe.trainer.seed}/{step}/{epoch}"
        yield from minibatches(batch, algorithm.num_mini_batches, seed)


def weighted(batch: PackedBatch, recipe: "Recipe") -> PackedBatch:
    """Adds the fields of the recipe's aggregation."""
    section = cast("AggregatedSection", recipe.algorithm)
    longest = float(recipe.rollout.max_new_tokens)
    return batch.with_fields(**weight_fields(batch, section.aggregation, longest))


def update_work(batch: PackedBatch, recipe: "Recipe") -> tuple[int, int]:
    """Returns tokens and sequences of a step's updates."""
    epochs = recipe.algorithm.epochs
    return len(batch) * epochs, batch.num_sequences * epochs


def lengths_of(batch: PackedBatch) -> Row:
    """Returns metrics of rows with completions."""
    trained = [int(mask.sum()) for mask in batch.mask.split(batch.lengths)]
    prompts = [n - count for n, count in zip(batch.lengths, trained, strict=True)]
    return {
        **length_metrics("prompt_length", prompts),
        **length_metrics("response_length", trained),
    }


@dataclass(kw_only=True)
class RowsTask:
    """Trains on rows, and evaluates them, as they are. first_row, parts: as `step_rows`."""

    recipe: "Recipe"
    policy: Engine
    rows: Seq[Any]
    held_out: Seq[Any]
    eval_sets: Mapping[str, Seq[Any]] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    first_row: int = 0
    parts: Seq[tuple[int, float]] = ()

    @property
    def trained(self) -> list[Engine]:
        return [self.policy]

    def sample_rows(self) -> list[dict[str, Any]]:
        return []

    def rows_of(self, step: int) -> list[Any]:
        """Returns the rows of a step."""
        numbers = step_rows(self.recipe, len(self.rows), step, self.first_row, self.parts)
        return [self.rows[number] for number in numbers]

    def measure(self, name: str, rows: Seq[Any]) -> Row:
        """Returns metrics of the set `name` ("": held_out)."""
        raise NotImplementedError

    def evaluate(self, step: int) -> Row:
        row: Row = {}
        for name, rows in {"": self.held_out, **self.eval_sets}.items():
            if rows:
                self.progress.phase("eval", step)
                prefix = f"eval/{name}/" if name else "eval_"
                measured = self.measure(name, rows)
                row |= {f"{prefix}{metric}": value for metric, value in measured.items()}
        return row


@dataclass(kw_only=True)
class SupervisedTask(RowsTask):
    algorithm: SFT

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        self.progress.phase("update", step + 1)
        batch = weighted(PackedBatch.pack(self.rows_of(step)), self.recipe)
        reports = [
            self.policy.train_step(part, self.algorithm.loss)
            for part in inner_batches(batch, self.recipe, step)
        ]
        return {
            **update_metrics(reports),
            "tokens": len(batch),
            **lengths_of(batch),
            "work": {"update": update_work(batch, self.recipe)},
        }

    def measure(self, name: str, rows: Seq[Sequence]) -> Row:
        batch = PackedBatch.pack(rows)
        total = float(self.policy.score(batch).logprob.sum())
        return {"loss": -total / max(int(batch.mask.sum()), 1)}


@dataclass(kw_only=True)
class RLTask:
    """Trains on samples with rewards: scores them, gives them advantages, updates."""

    recipe: "Recipe"
    policy: Engine
    algorithm: RLAlgorithm
    collector: SampleCollector
    critic: Engine | None = None
    reference: Engine | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def trained(self) -> list[Engine]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def sample_rows(self) -> list[dict[str, Any]]:
        return self.collector.sample_rows()

    def evaluate(self, step: int) -> Row:
        return self.collector.evaluate(step)

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
        batch, distances = self.prepare(samples, step)
        self.progress.phase("wait")
        if stopping():
            return None
        work = row.pop("work") | self._work(batch)
        update = self._update(batch, step) if batch.num_sequences else {}
        return {**row, **EMPTY_UPDATE, **update, **distances, "work": work}

    def prepare(self, samples: Seq[Sample], step: int) -> tuple[PackedBatch, Row]:
        """Returns the batch to train on, and metrics of the mismatch of sampler and policy."""
        rollout = self.recipe.rollout
        fields = self.algorithm.fields
        # In an asynchronous run the versions of weights are numbers of steps.
        version = None if self.recipe.trainer.max_lag is None else step
        batch = pack_samples(samples, rollout.temperature, version)
        metrics: Row = lag_metrics(batch)
        if rollout.mismatch_metrics:
            metrics |= mismatch_metrics(self.policy, batch, rollout.router_replay)
        if fields.old_logprob == "policy":
            batch = score_old(self.policy, batch, rollout.router_replay)
        else:
            batch = routed(batch, rollout.router_replay)
        if fields.old_logprob == "sampler":
            batch = batch.with_fields(old_logprob=batch.fields["rollout_logprob"])
        dropped = frozenset[int]()
        if fields.importance == "batch":
            correction = self.recipe.correction
            assert correction is not None and correction.ratio != "none"
            weights, dropped, shares = importance_weights(
                batch, ratio=correction.ratio, bounds=correction.bounds, outside=correction.outside
            )
            metrics = mismatch(batch, batch.fields["old_logprob"]) | metrics | shares
            batch = batch.with_fields(rollout_weight=weights)
        unrouted = batch.with_routing(None)
        if self.reference is not None:
            scored = self.reference.score(unrouted).logprob
            batch = batch.with_fields(reference_logprob=scored)
        if self.critic is not None:
            batch = batch.with_fields(old_value=self.critic.values(unrouted))
        batch = self.algorithm.with_advantages(batch, samples)  # the dropped count in their groups
        if dropped:
            kept = [i for i in range(batch.num_sequences) if i not in dropped]
            batch = batch.select(kept)
        return weighted(batch, self.recipe), metrics

    def _work(self, batch: PackedBatch) -> Work:
        tokens = len(batch)
        samples = batch.num_sequences
        passes = len({*SCORED_FIELDS} & {*batch.fields})
        if self.algorithm.fields.old_logprob == "sampler":
            passes -= 1
        work = {"update": update_work(batch, self.recipe)}
        return {"score": (tokens * passes, samples * passes), **work} if passes else work

    def _update(self, batch: PackedBatch, step: int) -> Row:
        trains_policy = step >= self.recipe.algorithm.steps_without_policy
        policy_reports = list[StepReport]()
        critic_reports = list[StepReport]()
        for part in inner_batches(batch, self.recipe, step):
            if trains_policy:
                policy_reports.append(self.policy.train_step(part, self.algorithm.loss))
            if self.critic is not None and self.algorithm.value_loss is not None:
                unrouted = part.with_routing(None)
                critic_reports.append(self.critic.train_step(unrouted, self.algorithm.value_loss))
        row = {
            name: value
            for name, value in update_metrics(policy_reports).items()
            if not ("mismatch" in name and math.isnan(value))  # there are no such tokens
        }
        row["tokens"] = len(batch)
        if "approx_kl" in row:
            row.setdefault("kl_mean", row["approx_kl"])  # without a reference
        return with_critic(row, critic_reports) if critic_reports else row


def with_critic(row: Row, reports: Seq[StepReport]) -> Row:
    """Adds the metrics of the critic's updates to those of the policy's."""
    critic = update_metrics(reports)
    flops = row.get("flops", 0.0) + critic.pop("flops")
    row = {**row, **{f"critic_{name}": value for name, value in critic.items()}, "flops": flops}
    if "skipped" in critic:
        row = {"skipped": True, "fault": f"the critic's update: {critic['fault']}", **row}
    return row
