"""One step of SFT or RL."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Prompt
from dovetail.data.rows import batch_rows, mixed_rows
from dovetail.engine.native import Engine
from dovetail.errors import DataError
from dovetail.launch.progress import Phase, Progress
from dovetail.rl.correction import importance_weights, lag_metrics, mismatch
from dovetail.rl.evaluation import SOLVED_REWARD, EvalSet, Rewarded, with_rewards
from dovetail.rl.experience import (
    OwnAdvantage,
    Sample,
    drop_equal_groups,
    minibatches,
    mismatch_metrics,
    pack_samples,
    punish_overlong,
    routed,
    sample_row,
    score_old,
    with_advantages,
)
from dovetail.rl.losses import weight_fields
from dovetail.rl.reward_manager import RewardManager
from dovetail.rl.step_metrics import (
    EMPTY_UPDATE,
    Row,
    Work,
    length_metrics,
    mean,
    sample_metrics,
    update_metrics,
)
from dovetail.sampler.base import Prompt as SamplerPrompt, Sampler, SamplingParams

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import AnyRL
    from dovetail.recipe.schema import Recipe

MAX_UNREWARDED_STEPS = 3  # in a row


def step_rows(
    recipe: "Recipe",
    num_rows: int,
    step: int,
    first_row: int = 0,
    parts: Seq[tuple[int, float]] = (),
) -> list[int]:
    """first_row: stream position at step 0. parts: of a mixture, see `mixed_rows`."""
    trainer = recipe.trainer
    cursor = first_row + step * trainer.prompts_per_step
    seed = trainer.seed if recipe.data.shuffle else None
    if parts:
        return mixed_rows(parts, trainer.prompts_per_step, seed, cursor)
    return batch_rows(num_rows, trainer.prompts_per_step, seed, cursor)


def inner_batches(batch: PackedBatch, recipe: "Recipe", step: int) -> Iterator[PackedBatch]:
    """Of each optimizer step."""
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
    """first_row, parts: as `step_rows`."""

    recipe: "Recipe"
    policy: Engine
    progress: Progress = field(default_factory=Progress)
    first_row: int = 0
    parts: Seq[tuple[int, float]] = ()
    samples: list[Sample] = field(init=False, default_factory=list)  # of the last step

    @property
    def trained(self) -> list[Engine]:
        return [self.policy]

    def sample_rows(self) -> list[dict[str, Any]]:
        return [sample_row(sample) for sample in self.samples]

    def rows_of(self, step: int, num_rows: int) -> list[int]:
        return step_rows(self.recipe, num_rows, step, self.first_row, self.parts)


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
    """Of rows that are evaluated as they are."""

    rows: Seq[Any]
    held_out: Seq[Any]
    eval_sets: Mapping[str, Seq[Any]] = field(default_factory=dict)

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
        chosen = self.rows_of(step, len(self.rows))
        batch = weighted(PackedBatch.pack([self.rows[i] for i in chosen]), self.recipe)
        reports = [
            self.policy.train_step(part, self.loss)
            for part in inner_batches(batch, self.recipe, step)
        ]
        work = {
            "update": (
                len(batch) * self.recipe.algorithm.epochs,
                len(chosen) * self.recipe.algorithm.epochs,
            )
        }
        return {**update_metrics(reports), "tokens": len(batch), **lengths_of(batch), "work": work}

    def measure(self, name: str, rows: Seq[Sequence]) -> Row:
        batch = PackedBatch.pack(rows)
        return {
            "loss": -float(self.policy.score(batch).logprob.sum()) / max(int(batch.mask.sum()), 1)
        }


def _later(samples: Seq[Sample], first: int) -> list[Sample]:
    """The samples with the numbers of their groups counted from `first`."""
    return [replace(sample, group=first + sample.group) for sample in samples]


def _added(before: Row, more: Row) -> Row:
    """Work, errors and the first cause of two batches."""
    if not before:
        return more
    work = {}
    for phase, (tokens, samples) in before["work"].items():
        more_tokens, more_samples = more["work"][phase]
        work[phase] = (tokens + more_tokens, samples + more_samples)
    counts = {name: before[name] + more[name] for name in ("reward_errors", "rewards_none")}
    return {**more, **before, "work": work, **counts}


@dataclass(kw_only=True)
class RLTask(Task):
    sampler: Sampler
    policy_loss: LossFn
    sampling: SamplingParams
    prompts: Seq[Prompt]
    held_out: Seq[Prompt]
    rewards: RewardManager
    decode: Callable[[Seq[int]], str]
    critic: Engine | None = None
    value_loss: LossFn | None = None
    reference: Engine | None = None
    advantage: OwnAdvantage | None = None  # in place of the algorithm's
    eval_sets: Seq[EvalSet] = ()
    write_eval: Callable[[str, int, Seq[Row]], None] = lambda *_: (
        None
    )  # set ("": data.eval), step, rows. Collective
    rollout_end: Callable[[list[Sample]], list[Sample]] = (
        list  # the samples to train on. Collective
    )
    sampler_metrics: Callable[[], Mapping[str, float]] = dict
    unrewarded: int = field(init=False, default=0)  # steps in a row
    dropped: list[Sample] = field(init=False, default_factory=list)  # of the last step

    def sample_rows(self) -> list[dict[str, Any]]:
        return [sample_row(sample) for sample in (*self.samples, *self.dropped)]

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
        self.sampler.refill(self.policy.weights(self.sampler.dtype))
        if (found := self._rollout(step, stopping)) is None:
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

    def _rollout(
        self, step: int, stopping: Callable[[], bool] = bool
    ) -> tuple[list[Sample], Row] | None:
        """Samples to train on, and metrics. Resampling (DAPO) takes rows of steps after the run's last."""
        wanted = self.recipe.trainer.prompts_per_step
        recipe = self.recipe
        algorithm = cast("AnyRL", recipe.algorithm)
        drops = algorithm.name == "grpo" and algorithm.drop_zero_std_groups
        drawn = list[Sample]()
        kept = list[Sample]()
        failed = dict[str, Any]()
        rewarded = False
        self.dropped = []
        for batch in range(
            algorithm.max_num_gen_batches if algorithm.name == "grpo" and drops else 1
        ):
            if batch:
                self.progress.phase("wait")
                if stopping():
                    return None
            rows = self.rows_of(step + batch * recipe.trainer.steps, len(self.prompts))
            prompts = [self.prompts[i] for i in rows]
            params = replace(self.sampling, step=step)
            where = f"step {step + 1}"
            first = batch * wanted
            samples, dropped, more = self._sample(prompts, params, where, first=first)
            self.dropped += dropped
            failed = _added(failed, more)
            rewarded = rewarded or bool(samples)
            samples = self.rollout_end(samples)
            drawn += samples
            kept += drop_equal_groups(samples) if drops else samples
            groups = [*dict.fromkeys(sample.group for sample in kept)]
            if len(groups) >= wanted:
                chosen = set(groups[:wanted])
                kept = [sample for sample in kept if sample.group in chosen]
                break
        if algorithm.overlong_buffer:
            limits = (
                recipe.rollout.max_new_tokens,
                algorithm.overlong_buffer,
                algorithm.overlong_penalty,
            )
            drawn = punish_overlong(drawn, *limits)
            kept = punish_overlong(kept, *limits)
        self.samples = drawn
        self._count_unrewarded(step, rewarded=rewarded)
        metrics = {
            **sample_metrics(drawn, compared=algorithm.name != "ppo"),
            **self.sampler_metrics(),
        }
        return kept, {**metrics, **failed}

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

    def evaluate(self, step: int) -> Row:
        """Metrics of data.eval (greedy) and of other sets; noise is the same at every step."""
        row: Row = {}
        sets = [
            *([EvalSet(name="", prompts=self.held_out)] if self.held_out else []),
            *self.eval_sets,
        ]
        if sets:
            self.progress.phase("eval", step)
            self.sampler.refill(self.policy.weights(self.sampler.dtype))
        for each in sets:
            params = SamplingParams(
                samples=each.samples,
                max_new_tokens=self.sampling.max_new_tokens,
                temperature=each.temperature,
                seed=zlib.crc32(f"{self.sampling.seed}/eval/{each.name}".encode()),
                stop_ids=self.sampling.stop_ids,
                stop=self.sampling.stop,
                banned_ids=self.sampling.banned_ids,
            )
            where = f"the evaluation after step {step}{each.name and f' on {each.name}'}"
            samples, dropped, failed = self._sample(each.prompts, params, where, "eval")
            self.write_eval(each.name, step, [sample_row(x) for x in (*samples, *dropped)])
            prefix = f"eval/{each.name}/" if each.name else "eval_"
            metrics = each.measure(samples)
            if not each.name:
                solved = [float(sample.reward >= SOLVED_REWARD) for sample in samples]
                metrics = {
                    "reward_mean": mean([sample.reward for sample in samples]),
                    "solved": mean(solved),
                }
            counts = {name: failed[name] for name in ("reward_errors", "rewards_none")}
            metrics |= {name: count for name, count in counts.items() if count}
            row |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
        return row

    def _sample(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams,
        where: str,
        phase: Phase | None = None,
        first: int = 0,
    ) -> Rewarded:
        """first: group of the first prompt."""
        requests = [
            SamplerPrompt(first + row, prompt.ids, prompt.media)
            for row, prompt in enumerate(prompts)
        ]
        self.progress.phase(phase or "rollout")
        completions = [replace(c, row=c.row - first) for c in self.sampler.sample(requests, params)]
        texts = [self.decode(c.ids) for c in completions]
        self.progress.phase(phase or "reward")
        found = with_rewards(prompts, completions, texts, self.rewards, where)
        samples = _later(found.samples, first)
        dropped = _later(found.dropped, first)
        made = (sum(len(c.ids) for c in completions), len(completions))
        work = {"rollout": made, "reward": made}
        return Rewarded(samples, dropped, {**found.metrics, "work": work})

    def _count_unrewarded(self, step: int, *, rewarded: bool) -> None:
        self.unrewarded = 0 if rewarded else self.unrewarded + 1
        if self.unrewarded == MAX_UNREWARDED_STEPS:
            raise DataError(
                f"step {step + 1}: {self.unrewarded} steps in a row have no sample with a "
                "reward, so that nothing is "
                f"trained: {self.rewards.name} returned None for all of them, which drops a "
                "sample; return a number"
            )

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
