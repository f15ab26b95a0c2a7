"""Rows to samples: completions are drawn and rewarded, for a training step and for evaluations."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from dovetail.data.examples import Prompt
from dovetail.data.rows import batch_rows, mixed_rows
from dovetail.engine.native import Engine
from dovetail.errors import DataError
from dovetail.launch.progress import Progress
from dovetail.rewards.samples import TrainingProgress
from dovetail.rl.evaluation import SOLVED_REWARD, EvalSet, Rewarded, with_rewards
from dovetail.rl.reward_manager import RewardManager
from dovetail.rl.samples import Sample, sample_row, with_overlong_penalty, without_zero_std_groups
from dovetail.rl.step_metrics import Row, mean, sample_metrics
from dovetail.sampler.base import Sampler, SamplingParams, TokenPrompt, requests_of
from dovetail.sampler.turn import GenerationRequest, Turn, generate_all

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import PolicyGradientSection
    from dovetail.recipe.schema import Recipe

MAX_UNREWARDED_STEPS = 3  # in a row


def step_rows(
    recipe: "Recipe",
    num_rows: int,
    step: int,
    first_row: int = 0,
    parts: Seq[tuple[int, float]] = (),
) -> list[int]:
    """Returns the numbers of a step's rows.

    first_row: stream position at step 0. parts: those of a mixture, see `mixed_rows`.
    """
    trainer = recipe.trainer
    cursor = first_row + step * trainer.prompts_per_step
    seed = trainer.seed if recipe.data.shuffle else None
    if parts:
        return mixed_rows(parts, trainer.prompts_per_step, seed, cursor)
    return batch_rows(num_rows, trainer.prompts_per_step, seed, cursor)


def requests_for(
    prompts: Seq[Prompt], params: SamplingParams, first: int = 0
) -> list[GenerationRequest]:
    """Returns `params.samples` requests for each prompt, by prompt; `first` is the first one's row."""
    rows = enumerate(prompts, first)
    return requests_of([TokenPrompt(row, each.ids, each.media) for row, each in rows], params)


def step_requests(
    step: int,
    *,
    recipe: "Recipe",
    prompts: Seq[Prompt],
    sampling: SamplingParams,
    first_row: int,
    parts: Seq[tuple[int, float]],
) -> list[GenerationRequest]:
    """Returns the requests of a training step, by prompt. first_row, parts: as for `step_rows`."""
    rows = step_rows(recipe, len(prompts), step, first_row, parts)
    return requests_for([prompts[row] for row in rows], replace(sampling, step=step))


def ignore_evaluation(name: str, step: int, rows: Seq[Row]) -> None:
    """Writes nothing."""


@dataclass(kw_only=True)
class SampleCollector:
    """Draws and rewards the completions of a step or an evaluation. Calls are collective.

    first_row, parts: as `step_rows` takes them. write_eval: takes the name of a set ("": data.eval),
    the step and its rows. rollout_end: returns the samples to train on. samples, dropped: those of
    the last step, with a reward and without. unrewarded: steps in a row without any reward.
    """

    recipe: "Recipe"
    policy: Engine
    sampler: Sampler
    sampling: SamplingParams
    prompts: Seq[Prompt]
    held_out: Seq[Prompt]
    rewards: RewardManager
    decode: Callable[[Seq[int]], str]
    eval_sets: Seq[EvalSet] = ()
    progress: Progress = field(default_factory=Progress)
    first_row: int = 0
    parts: Seq[tuple[int, float]] = ()
    write_eval: Callable[[str, int, Seq[Row]], None] = ignore_evaluation
    rollout_end: Callable[[list[Sample]], list[Sample]] = list
    sampler_metrics: Callable[[], Mapping[str, float]] = dict
    samples: list[Sample] = field(init=False, default_factory=list)
    dropped: list[Sample] = field(init=False, default_factory=list)
    unrewarded: int = field(init=False, default=0)

    def sample_rows(self) -> list[dict[str, Any]]:
        return [sample_row(sample) for sample in (*self.samples, *self.dropped)]

    def push(self) -> None:
        self.sampler.refill(self.policy.weights(self.sampler.dtype))

    def collect(
        self, step: int, stopping: Callable[[], bool] = bool
    ) -> tuple[list[Sample], Row] | None:
        """Returns samples to train on, and metrics; None if `stopping()` between two batches.

        Resampling (DAPO) takes the rows of steps after the run's last.
        """
        recipe = self.recipe
        algorithm = cast("PolicyGradientSection", recipe.algorithm)
        wanted = recipe.trainer.prompts_per_step
        drawn = list[Sample]()
        kept = list[Sample]()
        failed = dict[str, Any]()
        rewarded = False
        self.dropped = []
        self.rewards.progress = self._training_progress(step)
        for batch in range(algorithm.max_generations):
            if batch:
                self.progress.phase("wait")
                if stopping():
                    return None
            rows = step_rows(
                recipe,
                len(self.prompts),
                step + batch * recipe.trainer.steps,
                self.first_row,
                self.parts,
            )
            prompts = [self.prompts[i] for i in rows]
            params = replace(self.sampling, step=step)
            requests = requests_for(prompts, params, first=batch * wanted)
            self.progress.phase("rollout")
            if batch == 0:
                turns = self.sampler.generate_step(requests)
            else:
                turns = generate_all(self.sampler, requests)
            self.progress.phase("reward")
            found = self.reward(prompts, turns, f"step {step + 1}")
            self.dropped += found.dropped
            failed = _added(failed, found.metrics)
            rewarded = rewarded or bool(found.samples)
            samples = self.rollout_end(found.samples)
            drawn += samples
            kept += without_zero_std_groups(samples) if algorithm.drops_groups else samples
            groups = [*dict.fromkeys(sample.group for sample in kept)]
            if len(groups) >= wanted:
                chosen = set(groups[:wanted])
                kept = [sample for sample in kept if sample.group in chosen]
                break
        if algorithm.overlong_buffer:
            longest = recipe.rollout.max_new_tokens
            limits = (longest, algorithm.overlong_buffer, algorithm.overlong_penalty)
            drawn = with_overlong_penalty(drawn, *limits)
            kept = with_overlong_penalty(kept, *limits)
        self.samples = drawn
        self._count_unrewarded(step, rewarded=rewarded)
        metrics = sample_metrics(drawn, compared=algorithm.compares_samples)
        metrics |= self.rewards.take_metrics()
        return kept, {**metrics, **self.sampler_metrics(), **failed}

    def evaluate(self, step: int) -> Row:
        """Returns metrics of data.eval (greedy) and of other sets; noise is the same at every step."""
        row: Row = {}
        self.rewards.progress = self._training_progress(step)
        sets = [*self.eval_sets]
        if self.held_out:
            sets.insert(0, EvalSet(name="", prompts=self.held_out))
        if sets:
            self.progress.phase("eval", step)
            self.push()
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
            where = f"the evaluation after step {step}"
            prefix = "eval_"
            if each.name:
                where += f" on {each.name}"
                prefix = f"eval/{each.name}/"
            self.progress.phase("eval")
            turns = generate_all(self.sampler, requests_for(each.prompts, params))
            self.progress.phase("eval")
            found = self.reward(each.prompts, turns, where)
            rows = [sample_row(sample) for sample in (*found.samples, *found.dropped)]
            self.write_eval(each.name, step, rows)
            metrics = each.measure(found.samples)
            if not each.name:
                rewards = [sample.reward for sample in found.samples]
                metrics["reward_mean"] = mean(rewards)
                metrics["solved"] = mean([float(reward >= SOLVED_REWARD) for reward in rewards])
            for name in ("reward_errors", "rewards_none"):
                if found.metrics[name]:
                    metrics[name] = found.metrics[name]
            metrics |= self.rewards.take_metrics()
            row |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
        return row

    def reward(self, prompts: Seq[Prompt], turns: Seq[Turn], where: str) -> Rewarded:
        """Rewards the turns of prompts, which are in the order of `requests_for`.

        where: for messages.
        """
        samples = len(turns) // max(1, len(prompts))
        asked = [prompt for prompt in prompts for _ in range(samples)]
        texts = [self.decode(turn.ids) for turn in turns]
        found = with_rewards(asked, turns, texts, self.rewards, where)
        made = (sum(len(turn.ids) for turn in turns), len(turns))
        work = {"rollout": made, "reward": made}
        return found._replace(metrics={**found.metrics, "work": work})

    def _training_progress(self, step: int) -> TrainingProgress:
        """Returns what reward functions are told after `step` steps."""
        trainer = self.recipe.trainer
        rows_before = self.first_row + step * trainer.prompts_per_step
        rows_in_all = self.first_row + trainer.steps * trainer.prompts_per_step
        return TrainingProgress(
            global_step=step,
            max_steps=trainer.steps,
            epoch=rows_before / len(self.prompts),
            num_train_epochs=math.ceil(rows_in_all / len(self.prompts)),
        )

    def _count_unrewarded(self, step: int, *, rewarded: bool) -> None:
        self.unrewarded = 0 if rewarded else self.unrewarded + 1
        if self.unrewarded == MAX_UNREWARDED_STEPS:
            raise DataError(
                f"step {step + 1}: {self.unrewarded} steps in a row have no sample with a "
                "reward, so that nothing is "
                f"trained: {self.rewards.name} returned None for all of them, which drops a "
                "sample; return a number"
            )


def _added(before: Row, more: Row) -> Row:
    """Returns work, errors and the first cause of two batches."""
    if not before:
        return more
    work = {}
    for phase, (tokens, samples) in before["work"].items():
        more_tokens, more_samples = more["work"][phase]
        work[phase] = (tokens + more_tokens, samples + more_samples)
    counts = {name: before[name] + more[name] for name in ("reward_errors", "rewards_none")}
    return {**more, **before, "work": work, **counts}
