"""A run from a recipe."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dovetail.checkpoint.retention import from_a_whole_step
from dovetail.data.examples import Prompt, load_preferences, load_prompts, load_sft
from dovetail.engine.native import Engine
from dovetail.engine.teacher import Teacher
from dovetail.errors import ConfigError
from dovetail.factory.engine import compile_kernels, make_engine
from dovetail.factory.functions import (
    advantage,
    fields_of,
    policy_loss,
    preference_loss,
    same_keys,
    sft_loss,
)
from dovetail.factory.layouts import Backend, check_positions
from dovetail.factory.notes import notes
from dovetail.factory.parts import Engines, RunParts
from dovetail.factory.remote import (
    check_prompts,
    check_sent,
    make_async_sampler,
    make_remote_sampler,
)
from dovetail.factory.rewards import Printed, make_rewards
from dovetail.factory.rows import reads_answer
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.tokenizer import banned_ids, stop_ids, text_of
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.algorithms import PPO, SFT, AnyRL, CriticFree, PolicyGradient
from dovetail.recipe.distillation import SAMPLED, Distillation
from dovetail.recipe.preferences import DPO, KTO, AnyPreference
from dovetail.recipe.schema import Recipe
from dovetail.recipe.types import LayoutSection
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.rl.collect import SampleCollector
from dovetail.rl.distillation_task import DistillationTask, prompt_of
from dovetail.rl.losses import PolicyLoss, ValueLoss
from dovetail.rl.preference_task import PreferenceTask
from dovetail.rl.reward_manager import FunctionReward, RewardManager
from dovetail.rl.tasks import RLTask, SupervisedTask
from dovetail.run.console import LOGS
from dovetail.run.directory import CRITIC, POLICY, Contents, RunDirectory
from dovetail.run.paths import CHECKPOINTS
from dovetail.run.resume import refuse_other
from dovetail.run.state import model_fingerprint
from dovetail.run.trainer import TrainTask
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.native import NativeSampler, SamplerOptions
from dovetail.sampler.transformers import TransformersSampler

REWARDS_LOG = "rewards.log"  # what reward functions print
AnySampler = NativeSampler | TransformersSampler | RemoteSampler


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    task: TrainTask
    run: RunDirectory
    contents: Contents
    rewards: RewardManager | None
    at_close: ExitStack
    notes: Sequence[str] = ()
    stream: AsyncSampler | None = None  # of an asynchronous run
    printed: Printed = field(default_factory=Printed)

    def start(self) -> None:
        """Collective."""
        state = self.run.callbacks.state
        engines = self.contents.engines
        state.engine = engines[POLICY]
        state.critic = engines.get(CRITIC)
        self.run.open(self.contents)
        self.printed.log_to(self.run.path / LOGS / REWARDS_LOG)
        for note in self.notes:
            self.run.say(f"note: {note}")
        if self.stream is not None:
            resumed = self.run.resumed
            exact = self.recipe.trainer.deterministic
            for problem in self.stream.resume(
                repeats=exact and resumed is not None and resumed.repeats
            ):
                self.run.say(f"sampled again: {problem}")
        compile_kernels(self.contents.engines.values())

    def close(self) -> None:
        self.at_close.close()


class Builder(RunParts):
    def job(self) -> Job:
        """Reports all mistakes in a recipe before anything is written."""
        return from_a_whole_step(Path(self.recipe.run_dir) / CHECKPOINTS, self._job)

    def _job(self, damaged: Mapping[str, str]) -> Job:
        recipe = self.recipe
        rewards = None
        run = RunDirectory(recipe, self.mesh, self.resume, self.stop_signal, self.progress)
        with ExitStack() as self.at_close:
            self.at_close.callback(run.close)
            self.say = None if self.dry_run else run.say
            if run.lead and not self.dry_run:
                self.progress.listener = run.console.phase
                run.console.start()
            run.lock_and_find_resume(damaged)
            source = self.source
            model = self.first_weights = model_fingerprint(
                source.config, source.auxiliary, source.path, self.mesh
            )
            self.resumed = run.resumed
            if self.resumed is not None:
                refuse_other(
                    "the model's config, tokenizer or weights",
                    self.resumed.state.model,
                    model,
                    "model.path",
                )
            if isinstance(recipe.algorithm, SFT):
                task, rows, engines = self._sft(recipe.algorithm, run.first_row)
            elif isinstance(recipe.algorithm, Distillation):
                task, rows, engines = self._distillation(recipe.algorithm, run.first_row)
            elif not isinstance(recipe.algorithm, PolicyGradient):
                task, rows, engines = self._preferences(recipe.algorithm, run.first_row)
            else:
                run_dir = Path(recipe.run_dir)
                parts = recipe.reward, self.mesh, self.recipe_folder, run_dir
                rewards = make_rewards(*parts, self._reward_model, self.printed)
                self.at_close.callback(rewards.close)
                task, rows, engines = self._rl(recipe.algorithm, run, rewards)
            if self.resumed is not None:
                self.resumed.reader.verify_checksums(self.mesh, training=True)
            run.console.plan(self.recipe.trainer.steps)
            contents = Contents(
                engines=engines, auxiliary=engines[POLICY].origin.auxiliary, model=model, data=rows
            )
            run.check_space(contents)
            at_close = self.at_close.pop_all()
        done = 0 if self.resumed is None else self.resumed.state.step
        lines = notes(self.recipe, self.source.config, self.lengths, self.notes, done)
        return Job(
            self.recipe, task, run, contents, rewards, at_close, lines, self.stream, self.printed
        )

    def _sft(self, algorithm: SFT, first_row: int) -> tuple[TrainTask, str, Engines]:
        with agreed(self.mesh):
            loss = sft_loss(algorithm, self.recipe_folder)
        limits = self._limits(self._budget, self.recipe.data.max_length, "data.max_length")
        rows, held_out, sets, fingerprint = self._rows(partial(load_sft, limits=limits))
        policy = self._trained(self.source, self.mesh, POLICY, self.recipe.optim.lr)
        task = SupervisedTask(
            loss=loss, rows=rows, **self._shared(policy, held_out, sets, first_row)
        )
        return task, fingerprint, {POLICY: policy}

    def _shared(
        self, policy: Engine, held_out: Any, eval_sets: Any, first_row: int
    ) -> dict[str, Any]:
        """Fields of every task."""
        given = {
            "policy": policy,
            "held_out": held_out,
            "eval_sets": eval_sets,
            "first_row": first_row,
        }
        return {**given, "recipe": self.recipe, "progress": self.progress, "parts": self.parts}

    def _preferences(
        self, algorithm: AnyPreference, first_row: int
    ) -> tuple[TrainTask, str, Engines]:
        recipe = self.recipe
        paired = not isinstance(algorithm, KTO)
        role = self._role(recipe.reference, "reference") if algorithm.wants_reference else None
        limits = self._limits(self._budget, recipe.data.max_length, "data.max_length")
        limits = replace(limits, together=self._budget if paired else None)
        rows, held_out, sets, fingerprint = self._rows(
            partial(load_preferences, limits=limits, paired=paired)
        )
        policy = self._trained(self.source, self.mesh, POLICY, recipe.optim.lr)
        task = PreferenceTask(
            loss=preference_loss(algorithm),
            rows=rows,
            longest=limits.max_tokens or 0,
            reference=make_engine(*role, self.dtype, "lm", self._frozen) if role else None,
            precompute=isinstance(algorithm, DPO) and algorithm.precompute_ref_log_probs,
            **self._shared(policy, held_out, sets, first_row),
        )
        return task, fingerprint, {POLICY: policy}

    def _distillation(
        self, algorithm: Distillation, first_row: int
    ) -> tuple[TrainTask, str, Engines]:
        recipe = self.recipe
        offline = algorithm.lmbda < 1
        role = self._role(recipe.teacher, "teacher")
        sampler_mesh = self._sampler_mesh() if algorithm.samples else None
        longest = self._budget - recipe.rollout.max_new_tokens
        load: Callable[..., list[Any]] = partial(load_prompts, answers=False)
        if offline:
            load = load_sft
            limits = self._limits(self._budget, recipe.data.max_length, "data.max_length")
        else:
            limits = self._limits(longest, recipe.data.max_prompt_length)
        rows, held_out, sets, fingerprint = self._rows(partial(load, limits=limits))
        most = (
            max(len(prompt_of(number, row).ids) for number, row in enumerate(rows))
            if algorithm.samples
            else 0
        )
        if most > longest:
            raise ConfigError(
                f"the longest prompt of data.train has {most} tokens, and rollout.max_new_tokens "
                f"leaves {longest} of "
                "trainer.tokens_per_batch; raise the latter, lower the former, or set "
                "algorithm.lmbda=0, which samples nothing"
            )
        policy = self._trained(self.source, self.mesh, POLICY, recipe.optim.lr)
        sampling = {} if sampler_mesh is None else self._sampling(sampler_mesh)
        teacher = make_engine(*role, self.dtype, "lm", self._frozen)
        reads_head = algorithm.divergence != SAMPLED
        shared = self._shared(policy, held_out, sets, first_row)
        heads = Teacher.of(teacher, policy) if reads_head else teacher
        return (
            DistillationTask(teacher=heads, rows=rows, **sampling, **shared),
            fingerprint,
            {POLICY: policy},
        )

    @property
    def _backend(self) -> Backend:
        return "native" if self.recipe.rollout.backend == "native" else "transformers"

    def _sampler_mesh(self) -> Mesh:
        rollout = self.recipe.rollout
        if not rollout.inside:
            self.replicas = self._engines()
            return self.mesh
        folded = partial(backend_layout, self.source, backend=self._backend)
        return self._mesh(rollout.layout or LayoutSection(), "rollout.layout", folded)

    def _sampling(self, mesh: Mesh) -> dict[str, Any]:
        """Fields of a task."""
        rollout = self.recipe.rollout
        recipe = self.recipe
        stops = stop_ids(self.source, self.tokenizer)
        if not rollout.inside:
            say = self.say or self.notes.append
            remote = make_remote_sampler(
                self.source, recipe, mesh, self.dtype, self.replicas, say, self.processor
            )
            self.at_close.callback(remote.close)
            sampler: AnySampler = remote
        else:
            options = SamplerOptions(max_num_seqs=rollout.max_num_seqs)
            sampler = make_sampler(self.source, mesh, self.dtype, self._backend, options)
        sampler.watch = self.progress.advance
        sampling = SamplingParams(
            **same_keys(rollout, SamplingParams),
            samples=rollout.samples_per_prompt,
            seed=recipe.trainer.seed,
            stop_ids=() if rollout.ignore_eos else stops,
            trace=rollout.router_replay == "rollout"
            or (rollout.mismatch_metrics and rollout.backend == "native" and rollout.inside),
            banned_ids=banned_ids(self.source, self.tokenizer, self.processor, stops),
        )
        decode = partial(text_of, stops=stops, tokenizer=self.tokenizer)
        return {"sampler": sampler, "sampling": sampling, "decode": decode}

    def _stream(
        self, sampling: dict[str, Any], run: RunDirectory, prompts: Sequence[Prompt], rows: str
    ) -> AsyncSampler:
        inputs = [self.first_weights, rows]
        stream = make_async_sampler(
            sampling["sampler"], self.recipe, run, sampling["sampling"], prompts, self.parts, inputs
        )
        self.at_close.callback(stream.close)
        run.after_save = stream.saved
        sampling |= {"sampler": stream, "sampler_metrics": lambda: stream.counts}
        return stream

    def _rl(
        self, algorithm: AnyRL, run: RunDirectory, rewards: RewardManager
    ) -> tuple[TrainTask, str, Engines]:
        recipe, rollout, folder = self.recipe, self.recipe.rollout, self.recipe_folder
        with agreed(self.mesh):
            keys = same_keys(algorithm, PolicyLoss) | (
                {"kl_coef": 0.0} if algorithm.kl_in == "reward" else {}
            )
            if recipe.weighs_in_update and recipe.correction is not None:
                keys |= {
                    "sampler_bounds": recipe.correction.bounds,
                    "outside": recipe.correction.outside,
                }
            given = fields_of(recipe, algorithm)
            loss = policy_loss(algorithm, folder, ["advantage", *given], **keys)
            own_advantage = (
                advantage(algorithm.advantage, folder, given)
                if isinstance(algorithm, CriticFree)
                else None
            )
        critic_role = self._role(recipe.critic, "critic") if isinstance(algorithm, PPO) else None
        wants_reference = algorithm.kl_coef > 0 or recipe.reference.path is not None
        reference_role = self._role(recipe.reference, "reference") if wants_reference else None
        longest = self._budget - rollout.max_new_tokens  # meshes are known now
        limits = self._limits(longest, recipe.data.max_prompt_length)
        sampler_mesh = self._sampler_mesh()
        load = partial(load_prompts, limits=limits, answers=reads_answer(recipe.reward))
        prompts, held_out, sets, fingerprint = self._rows(load)
        asked = [*prompts, *held_out, *chain(*sets.values())]
        key = "rollout.max_new_tokens"
        lengths = [len(prompt.ids) for prompt in asked]
        check_positions(self.source.config, self._backend, lengths, rollout.max_new_tokens, key)
        with agreed(self.mesh):
            check_sent(recipe, prompts)
            check_prompts(self.source, self.replicas, asked, rollout.max_new_tokens)
        eval_sets = self._eval_sets(sets, run.say)
        policy = self._trained(self.source, self.mesh, POLICY, recipe.optim.lr)
        critic = (
            self._trained(*critic_role, CRITIC, recipe.critic.lr or recipe.optim.lr)
            if critic_role
            else None
        )
        sampling = self._sampling(sampler_mesh)
        if recipe.trainer.max_lag is not None:
            self.stream = self._stream(sampling, run, prompts, fingerprint)
        for reward in rewards.rewards.values():
            if isinstance(reward, FunctionReward) and reward.runner is not None:
                reward.runner.watch = self.progress.advance
        collector = SampleCollector(
            **sampling,
            **self._shared(policy, held_out, eval_sets, run.first_row),
            prompts=prompts,
            rewards=rewards,
            write_eval=run.write_eval,
            rollout_end=run.callbacks.replace_samples,
        )
        task = RLTask(
            recipe=self.recipe,
            policy=policy,
            progress=self.progress,
            collector=collector,
            critic=critic,
            reference=make_engine(*reference_role, self.dtype, "lm", self._frozen)
            if reference_role
            else None,
            policy_loss=loss,
            advantage=own_advantage,
            value_loss=ValueLoss(algorithm.value_clip, algorithm.value_coef)
            if isinstance(algorithm, PPO)
            else None,
        )
        return (
            task,
            fingerprint,
            {POLICY: policy} if critic is None else {POLICY: policy, CRITIC: critic},
        )
