"""What one training step does: supervised, or reinforcement learning."""

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Prompt
from dovetail.data.rows import batch_rows
from dovetail.engine.base import Engine
from dovetail.errors import DataError
from dovetail.launch.progress import Phase, Progress
from dovetail.rl.experience import (
    AdvantageSettings,
    Sample,
    drop_equal_groups,
    minibatches,
    pack_samples,
    with_advantages,
)
from dovetail.rl.losses import Aggregation, weight_fields
from dovetail.rl.rewards import RewardTask, count_errors
from dovetail.rl.router_replay import Replay, monitor, routed, score_old
from dovetail.rl.step_metrics import EMPTY_UPDATE, Row, StepMetrics, mean, sample_metrics
from dovetail.rollout.base import Prompt as SamplerPrompt, Sampler, SamplingParams

MAX_UNREWARDED_STEPS = 3  # in a row


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long, how much at a time, when to stop, and whom to tell where the loop is."""

    steps: int
    seed: int
    rows_per_step: int
    epochs: int
    minibatches: int
    aggregation: Aggregation
    aggregation_constant: float = 1.0
    eval_every: int = 0
    save_every: int = 0
    save_on_stop: bool = True
    stop_at_reward: float | None = None
    time_budget_seconds: float | None = None
    shuffle: bool = True
    first_row: int = 0  # of the stream at step 0; not 0 where an earlier start took another number of rows a step
    max_skipped_steps: int = 3
    check_replicas_every: int = 0
    progress: Progress = field(default_factory=Progress)

    def rows(self, num_rows: int, step: int) -> list[int]:
        """Which data rows a step takes."""
        return batch_rows(num_rows, self.rows_per_step, self.seed if self.shuffle else None, self.cursor(step))

    def cursor(self, step: int) -> int:
        """How many rows of the endless stream have been taken before `step` (from 0)."""
        return self.first_row + step * self.rows_per_step

    def reached(self, rows: Seq[Row]) -> bool:
        """Whether the last of the steps done is good enough to stop; a row that was read again says null for no number."""
        if self.stop_at_reward is None or not rows:
            return False
        reward = rows[-1].get("reward_mean")
        return reward is not None and bool(reward >= self.stop_at_reward)

    def after(self, step: int, cursor: int) -> "LoopSettings":
        """The same for a run that took `cursor` rows in its first `step` steps."""
        return replace(self, first_row=cursor - step * self.rows_per_step)


def inner_batches(batch: PackedBatch, loop: LoopSettings, step: int) -> Iterator[PackedBatch]:
    """What one step trains on, in order: `epochs` passes of `minibatches` parts each."""
    for epoch in range(loop.epochs):
        yield from minibatches(batch, loop.minibatches, f"{loop.seed}/{step}/{epoch}")


def weighted(batch: PackedBatch, loop: LoopSettings) -> PackedBatch:
    """The batch with its tokens' weights in the loss."""
    return batch.with_fields(**weight_fields(batch, loop.aggregation, loop.aggregation_constant))


SOLVED_REWARD = 1.0  # a reward that counts as solved in evaluations


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Task(Protocol):
    """One algorithm: what a step does, and how good the model is now. `samples` are the last step's, where it draws."""

    samples: list[Sample]

    @property
    def trained(self) -> Seq[Engine]:
        """The models that are trained."""
        ...

    def step(self, step: int, stopping: Callable[[], bool] = never) -> Row | None:
        """Run step `step` (from 0): the row for metrics.jsonl, without the clock's keys.

        `stopping` is asked where a step can be left with nothing changed; None: it was left.
        """
        ...

    def evaluate(self, step: int) -> Row:
        """Metrics on held-out rows, empty without any."""
        ...


@dataclass(frozen=True, kw_only=True)
class RLSettings:
    """How to sample and what to make of it."""

    sampling: SamplingParams
    advantages: AdvantageSettings
    skip_equal_groups: bool = False
    old_logprobs: bool = True  # False: one update a step, so the old log-probs are the update's own
    critic_warmup: int = 0
    replay: Replay = "none"
    monitor: bool = False  # tell how far the policy is from what was sampled


@dataclass(frozen=True, kw_only=True)
class RLModels:
    """Who takes part: the policy always, the others where the algorithm asks for them."""

    policy: Engine
    sampler: Sampler
    critic: Engine | None = None
    reference: Engine | None = None


class SupervisedTask:
    """Supervised fine-tuning: the next rows, one update (or several)."""

    def __init__(
        self, policy: Engine, loss: LossFn, rows: Seq[Sequence], held_out: Seq[Sequence], loop: LoopSettings
    ) -> None:
        self.policy, self.loss, self.loop = policy, loss, loop
        self.rows, self.held_out = rows, held_out
        self.samples: list[Sample] = []
        self.trained = [policy]

    def step(self, step: int, stopping: Callable[[], bool] = never) -> Row | None:
        self.loop.progress.phase("update", step + 1)
        chosen = self.loop.rows(len(self.rows), step)
        batch = weighted(PackedBatch.pack([self.rows[i] for i in chosen]), self.loop)
        updates = StepMetrics(self.policy, self.loss)
        for part in inner_batches(batch, self.loop, step):
            updates.run(part)
        return {**updates.row(), "tokens": len(batch)}

    def evaluate(self, step: int) -> Row:
        if not self.held_out:
            return {}
        self.loop.progress.phase("eval", step)
        batch = PackedBatch.pack(self.held_out)
        stats = self.policy.score(batch)
        return {"eval_loss": -float(stats.logprob.sum()) / max(int(batch.mask.sum()), 1)}


class RLTask:
    """GRPO, RLOO and PPO: they differ by the advantages, and by whether there is a critic."""

    def __init__(
        self,
        models: RLModels,
        losses: tuple[LossFn, LossFn | None],
        prompts: Seq[Prompt],
        held_out: Seq[Prompt],
        judge: RewardTask,
        decode: Callable[[Seq[int]], str],
        settings: RLSettings,
        loop: LoopSettings,
    ) -> None:
        """`losses` are the policy's and the critic's. `decode` makes text of a completion's ids, without its end."""
        self.models, self.settings, self.loop = models, settings, loop
        self.policy_loss, self.value_loss = losses
        self.prompts, self.held_out = prompts, held_out
        self.judge, self.decode = judge, decode
        self.samples: list[Sample] = []  # of the last step, for the run's files
        self.unrewarded = 0  # steps in a row
        self.trained = [engine for engine in (models.policy, models.critic) if engine is not None]

    def step(self, step: int, stopping: Callable[[], bool] = never) -> Row | None:
        chosen = self.loop.rows(len(self.prompts), step)
        prompts = [self.prompts[i] for i in chosen]
        self.loop.progress.phase("push", step + 1)
        samples, failed = self._sample(prompts, replace(self.settings.sampling, step=step))
        self.samples = samples
        self._count_unrewarded(step)
        compared = self.settings.advantages.kind != "ppo"
        row = {**sample_metrics(samples, compared=compared), **failed}
        if self.settings.skip_equal_groups:
            samples = drop_equal_groups(samples)
        if not samples:  # nothing to learn from: every group agrees, or the reward dropped every sample
            return {**row, **EMPTY_UPDATE}
        if stopping():
            return None
        self.loop.progress.phase("score")
        found = self._monitor(samples)
        batch = self._prepare(samples)
        if stopping():
            return None
        policy = StepMetrics(self.models.policy, self.policy_loss)
        critic = None
        if self.models.critic is not None and self.value_loss is not None:
            critic = StepMetrics(self.models.critic, self.value_loss)
        for part in inner_batches(batch, self.loop, step):
            if step >= self.settings.critic_warmup:
                policy.run(part)
            if critic is not None:
                critic.run(part.with_routing(None))
        update = policy.row()
        if "approx_kl" in update:  # without a reference, the KL to the policy that sampled
            update.setdefault("kl_mean", update["approx_kl"])
        row |= {**EMPTY_UPDATE, **update, **found, "tokens": len(batch)}
        if critic is not None:
            told = critic.row()
            flops = row.get("flops", 0.0) + told.pop("flops")
            row |= {f"critic_{name}": value for name, value in told.items()}
            row["flops"] = flops
            if "skipped" in told:
                row = {"skipped": True, "fault": f"the critic's update: {told['fault']}", **row}
        return row

    def evaluate(self, step: int) -> Row:
        """Greedy completions of the held-out prompts: mean reward, and the share that is solved."""
        if not self.held_out:
            return {}
        params = SamplingParams(
            max_new_tokens=self.settings.sampling.max_new_tokens,
            temperature=0.0,
            stop_ids=self.settings.sampling.stop_ids,
            banned_ids=self.settings.sampling.banned_ids,
            step=step,
        )
        self.loop.progress.phase("eval", step)
        samples, failed = self._sample(self.held_out, params, "eval")
        rewards = [sample.reward for sample in samples]
        row = {"eval_reward_mean": mean(rewards), "eval_solved": mean([float(r >= SOLVED_REWARD) for r in rewards])}
        return {**row, "eval_reward_errors": failed["reward_errors"]} if failed["reward_errors"] else row

    def _sample(
        self, prompts: Seq[Prompt], params: SamplingParams, phase: Phase | None = None
    ) -> tuple[list[Sample], Row]:
        """Completions with their rewards; those whose reward failed are dropped, counted, and the first one's cause kept.

        phase: that all of this belongs to; default: rollout, then reward.
        """
        sampler, progress = self.models.sampler, self.loop.progress
        sampler.refill(self.models.policy.weights(sampler.dtype))
        asked = [SamplerPrompt(row, prompt.ids, prompt.media) for row, prompt in enumerate(prompts)]
        progress.phase(phase or "rollout")
        completions = sampler.sample(asked, params)
        texts = [self.decode(c.ids) for c in completions]
        progress.phase(phase or "reward")
        results = self.judge([prompts[c.row] for c in completions], completions, texts)
        where = f"the evaluation after step {params.step}" if phase == "eval" else f"step {params.step + 1}"
        errors, cause = count_errors(results, [prompts[c.row].id for c in completions], where)
        samples = [
            Sample(prompts[c.row], c.row, c, text, result.value)
            for c, text, result in zip(completions, texts, results, strict=True)
            if result.value is not None
        ]
        return samples, {"reward_errors": errors, **({} if cause is None else {"reward_error": cause})}

    def _count_unrewarded(self, step: int) -> None:
        """Raise DataError after too many steps in a row without any sample that has a reward."""
        self.unrewarded = 0 if self.samples else self.unrewarded + 1
        if self.unrewarded == MAX_UNREWARDED_STEPS:
            raise DataError(
                f"step {step + 1}: {self.unrewarded} steps in a row have no sample with a reward, so that nothing is "
                f"trained: {self.judge.name} returned None for all of them, which drops a sample; return a number"
            )

    def _monitor(self, samples: Seq[Sample]) -> Row:
        """How far the policy is from what it is said to have sampled, where that is asked for."""
        if not self.settings.monitor:
            return {}
        batch = pack_samples(samples, self.settings.sampling.temperature)
        return monitor(self.models.policy, batch, self.settings.replay)

    def _prepare(self, samples: Seq[Sample]) -> PackedBatch:
        """Everything that the losses read, on every counted token."""
        settings, models = self.settings, self.models
        batch = pack_samples(samples, settings.sampling.temperature)
        if settings.old_logprobs or settings.replay == "trainer":
            batch = score_old(models.policy, batch, settings.replay)
        else:
            batch = routed(batch, settings.replay)
        if models.reference is not None:
            batch = batch.with_fields(reference_logprob=models.reference.score(batch.with_routing(None)).logprob)
        if models.critic is not None:
            batch = batch.with_fields(old_value=models.critic.values(batch.with_routing(None)))
        return weighted(with_advantages(batch, samples, settings.advantages), self.loop)
