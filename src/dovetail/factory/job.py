"""From a recipe to everything that a run consists of."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch

from dovetail.checkpoint.retention import Retention, from_a_whole_step
from dovetail.data.chat import Renderer
from dovetail.data.examples import Limits, Tokenizer, load_prompts, load_sft
from dovetail.device import peak_flops, peak_memory_gib
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.engine.native import NativeEngine
from dovetail.engine.nonfinite import StepWatch
from dovetail.errors import ConfigError, LayoutError
from dovetail.factory.engine import EngineOptions, make_engine, make_mesh
from dovetail.factory.layouts import check_layout
from dovetail.factory.lengths import check_positions, longest_row
from dovetail.factory.notes import check_experts, notes
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.settings import optim_settings, rl_settings
from dovetail.factory.tokenizer import banned_ids, load_processor, load_tokenizer, stop_ids, text_of
from dovetail.factory.warmup import compile_kernels
from dovetail.launch.progress import Progress, collective_timeout
from dovetail.parallel.consensus import agreed, refuse_different
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import num_ranks
from dovetail.recipe.schema import (
    PPO,
    SFT,
    CriticSection,
    LayoutSection,
    PolicyGradient,
    Recipe,
    ReferenceSection,
)
from dovetail.rl.losses import PolicyLoss, SFTLoss, ValueLoss
from dovetail.rl.rewards import RewardRunner, RewardTask
from dovetail.rl.tasks import LoopSettings, RLModels, RLTask, SupervisedTask, Task
from dovetail.run.directory import CRITIC, POLICY, Contents, RunDirectory, RunSettings
from dovetail.run.resume import CHECKPOINTS, ROWS, Resumed, refuse_other
from dovetail.run.state import model_fingerprint, refuse_other_models, rows_fingerprint
from dovetail.weights.hf_directory import Pretrained

Engines = dict[str, NativeEngine]  # by the role in a checkpoint
Example = TypeVar("Example")


@dataclass(frozen=True)
class Job:
    """A run, ready to go."""

    task: Task
    run: RunDirectory
    loop: LoopSettings
    contents: Contents
    judge: RewardTask | None
    deterministic: bool
    notes: Sequence[str] = ()

    def start(self) -> None:
        """Write the run's first files, say what its user should know, and compile. Collective."""
        self.run.open(self.contents)
        for note in self.notes:
            self.run.say(f"note: {note}")
        compile_kernels(self.contents.engines.values(), self.run.say)

    def close(self) -> None:
        """End the display, the loggers and the reward processes, however the run went."""
        self.run.close()
        if self.judge is not None:
            self.judge.close()


class Builder:
    """Makes the parts of one run; what several of them need is made once. Collective."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        recipe_folder: Path,
        stop_signal: Callable[[], int],
        resume: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        """`recipe_folder` is where a reward of the user's own is imported from. resume: auto, never or step=N."""
        self.progress = progress or Progress()
        self.recipe, self.device, self.recipe_folder = recipe, device, recipe_folder
        self.stop_signal, self.resume = stop_signal, resume
        self.resumed: Resumed | None = None
        self.lengths: list[int] = []  # of the rows to train on, in tokens
        self.dropped: list[str] = []  # what is told of those left out, and of models
        self.meshes: dict[Layout, Mesh] = {}
        self.mesh = self._mesh(recipe.layout)
        self.dtype = getattr(torch, recipe.model.dtype)
        with agreed(self.mesh):
            trusted = {"trust_remote_code": recipe.model.trust_remote_code}
            self.source = Pretrained.open(recipe.model.path, recipe.model.engine)
            check_layout(self.source.spec, self.mesh.layout)
            self.dropped += self.source.notes
            check_experts(recipe, self.source.spec)
            self.tokenizer: Tokenizer = load_tokenizer(self.source, **trusted)
            self.processor = load_processor(self.source, **trusted)
        refuse_other_models("model.path", self.source, self.mesh)

    def job(self) -> Job:
        """The whole run. Everything that a user may have got wrong is found here, before anything is written."""
        return from_a_whole_step(Path(self.recipe.run_dir) / CHECKPOINTS, self._job)

    def _job(self, damaged: Mapping[str, str]) -> Job:
        recipe, loop = self.recipe, self._loop()
        run, judge = RunDirectory(self._run_settings(), self.mesh), None
        with ExitStack() as on_failure:
            on_failure.callback(run.close)
            run.claim(damaged)
            model = model_fingerprint(self.source.config, self.source.sides, self.source.path, self.mesh)
            self.resumed = run.resumed
            if self.resumed is not None:
                state = self.resumed.state
                refuse_other("the model's config, tokenizer or weights", state.model, model, "model.path")
                loop = loop.after(state.step, state.cursor)
            if isinstance(recipe.algorithm, SFT):
                task, rows, engines = self._sft(loop)
            else:
                judge = RewardTask(self._reward_runner(), self.mesh, str(recipe.reward.function or recipe.reward.name))
                on_failure.callback(judge.close)
                task, rows, engines = self._rl(recipe.algorithm, loop, judge)
            if self.resumed is not None:
                self.resumed.reader.verify_checksums(self.mesh, training=True)
            sides = engines[POLICY].origin.sides
            contents = Contents(engines=engines, sides=sides, model=model, data=rows, cursor=loop.cursor)
            run.check_space(contents)
            on_failure.pop_all()
        return Job(
            task,
            run,
            loop,
            contents,
            judge,
            recipe.trainer.deterministic,
            notes(recipe, self.source.config, self.lengths, self.dropped),
        )

    def _sft(self, loop: LoopSettings) -> tuple[Task, str, Engines]:
        load = partial(load_sft, tokenizer=self.tokenizer, limits=self._limits(self._budget), processor=self.processor)
        rows, held_out, told = self._rows(load)
        policy = self._trained(self.source, self.mesh, POLICY, self.recipe.optim.lr)
        return SupervisedTask(policy, SFTLoss(), rows, held_out, loop), told, {POLICY: policy}

    def _rl(self, algorithm: PolicyGradient, loop: LoopSettings, judge: RewardTask) -> tuple[Task, str, Engines]:
        recipe, rollout = self.recipe, self.recipe.rollout
        critic_role = self._role(recipe.critic, "critic") if isinstance(algorithm, PPO) else None
        wants_reference = algorithm.kl_coef > 0 or recipe.reference.path is not None
        reference_role = self._role(recipe.reference, "reference") if wants_reference else None
        limits = self._limits(self._budget - rollout.max_new_tokens)  # all models have their meshes now
        sampler_mesh = self._sampler_mesh()  # which may refuse its layout, so before any weight is read
        load = partial(load_prompts, tokenizer=self.tokenizer, limits=limits, processor=self.processor)
        prompts, held_out, told = self._rows(load)
        lengths, key = [len(prompt.ids) for prompt in (*prompts, *held_out)], "rollout.max_new_tokens"
        check_positions(self.source.config, rollout.backend, lengths, rollout.max_new_tokens, key)
        policy = self._trained(self.source, self.mesh, POLICY, recipe.optim.lr)
        critic = self._trained(*critic_role, CRITIC, recipe.critic.lr or recipe.optim.lr) if critic_role else None
        reference = self._reference(*reference_role) if reference_role else None
        sampler = make_sampler(self.source, sampler_mesh, self.dtype, rollout.backend)
        models = RLModels(policy=policy, sampler=sampler, critic=critic, reference=reference)
        losses = (
            PolicyLoss(
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                dual_clip=algorithm.dual_clip,
                ratio=algorithm.ratio,
                kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
                kl_estimator=algorithm.kl_estimator,
                entropy_coef=algorithm.entropy_coef,
            ),
            ValueLoss(algorithm.value_clip, algorithm.value_coef) if isinstance(algorithm, PPO) else None,
        )
        stops = stop_ids(self.source, self.tokenizer)
        decode = partial(text_of, stops=stops, tokenizer=self.tokenizer)
        banned = banned_ids(self.source, self.tokenizer, self.processor, stops)
        settings = rl_settings(recipe, algorithm, stops, banned)
        engines = {POLICY: policy} if critic is None else {POLICY: policy, CRITIC: critic}
        return RLTask(models, losses, prompts, held_out, judge, decode, settings, loop), told, engines

    def _rows(self, load: Callable[..., list[Example]]) -> tuple[list[Example], list[Example], str]:
        """The rows to train on, those held out, and the fingerprint of the first, which a resumed run must find again."""
        data = self.recipe.data
        with agreed(self.mesh), Renderer() as renderer:
            rows = load(data.train, renderer=renderer)
            held_out = load(data.eval, renderer=renderer) if data.eval else []
        told, self.lengths = rows_fingerprint(rows), [len(vars(row)["ids"]) for row in rows]
        refuse_different({"data.train": told, "data.eval": rows_fingerprint(held_out)}, self.mesh)
        if self.resumed is not None:
            refuse_other("the rows of data.train", self.resumed.state.data, told, ROWS[data.overlong])
        return rows, held_out, told

    def _role(self, section: CriticSection | ReferenceSection, name: str) -> tuple[Pretrained, Mesh]:
        """Where another model's weights lie, and its mesh: its own layout's, or the policy's."""
        source = self._other(f"{name}.path", section.path)
        self.dropped += source.notes
        check = partial(check_layout, source.spec)
        return source, self._mesh(section.layout or self.recipe.layout, f"{name}.layout", check)

    def _reference(self, source: Pretrained, mesh: Mesh) -> NativeEngine:
        options = EngineOptions(master_dtype=self.dtype, tokens_per_batch=self.recipe.trainer.tokens_per_batch)
        return make_engine(source, mesh, self.dtype, "lm", options)

    def _other(self, key: str, path: str | None) -> Pretrained:
        """The model of another role, which reads the policy's ids. Collective."""
        with agreed(self.mesh):
            source = self.source if path is None else Pretrained.open(path, self.recipe.model.engine)
            theirs, ours = source.spec.vocab_size, self.source.spec.vocab_size
            if theirs < ours:
                raise ConfigError(
                    f"{key} {path} has a vocabulary of {theirs}, but the policy's ids go up to {ours - 1}; give a model with "
                    "the policy's tokenizer"
                )
        if path is not None:
            refuse_other_models(key, source, self.mesh)
        return source

    def _trained(self, source: Pretrained, mesh: Mesh, role: str, lr: float) -> NativeEngine:
        """An engine that learns: from its source's weights, or from where the resumed run left it."""
        recipe, resumed = self.recipe, self.resumed
        head: Literal["lm", "value"] = "lm" if role == POLICY else "value"
        if resumed is not None and role not in resumed.state.updates:
            raise ConfigError(f"{resumed.reader.path} holds no {role}; start a new run from its weights (model.path)")
        save_dtype = recipe.model.save_dtype
        options = EngineOptions(
            optim=optim_settings(recipe, lr, head),
            tokens_per_batch=recipe.trainer.tokens_per_batch,
            recompute=recipe.trainer.activation_checkpointing,
            offload_activations=recipe.trainer.offload_activations,
            offload_optimizer=recipe.trainer.offload_optimizer,
            mlp_tile_tokens=recipe.trainer.mlp_tile_tokens,
            fresh_head_seed=recipe.trainer.seed,
            save_dtype=None if save_dtype is None else getattr(torch, save_dtype),
            balance=BalanceSettings(
                aux_coef=recipe.model.moe.aux_loss_coef,
                z_coef=recipe.model.moe.z_loss_coef,
                bias_rate=recipe.model.moe.bias_update_rate,
            ),
            resume=None if resumed is None else (resumed.reader, role, resumed.state.updates[role]),
            watch=StepWatch(self.progress, Path(recipe.run_dir) / "faults"),
        )
        return make_engine(source, mesh, self.dtype, head, options)

    def _reward_runner(self) -> RewardRunner | None:
        """Reward processes on the first rank; a reward that does not load is refused on all."""
        reward, runner = self.recipe.reward, None
        with agreed(self.mesh):
            if self.mesh["world"].rank == 0:
                runner = RewardRunner(
                    reward.name,
                    function=reward.function,
                    options=reward.options,
                    directory=self.recipe_folder,
                    timeout=reward.timeout_seconds,
                    workers=reward.workers,
                )
        return runner

    def _sampler_mesh(self) -> Mesh:
        section = self.recipe.rollout.layout or LayoutSection()
        folded = partial(backend_layout, self.source, backend=self.recipe.rollout.backend)
        return self._mesh(section, "rollout.layout", folded)

    def _mesh(
        self,
        section: LayoutSection,
        name: str = "layout",
        change: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> Mesh:
        """One for every layout: the sampler shares an engine's where layouts are equal."""
        try:
            layout = change(section.to_layout().resolve(num_ranks()))
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from error
        if layout not in self.meshes:
            limit = collective_timeout(self.recipe.trainer.timeouts)
            self.meshes[layout] = make_mesh(layout, self.device, timeout=limit)
        return self.meshes[layout]

    @property
    def _budget(self) -> int:
        """Tokens that a row may have, so that it fits a micro-batch with its padding under every model's layout."""
        return longest_row(self.recipe.trainer.tokens_per_batch, [m.token_multiple for m in self.meshes.values()])

    def _limits(self, max_tokens: int) -> Limits:
        if max_tokens < 1:
            raise ConfigError(
                f"trainer.tokens_per_batch={self.recipe.trainer.tokens_per_batch} leaves no room for a prompt beside "
                f"rollout.max_new_tokens={self.recipe.rollout.max_new_tokens}; raise the first or lower the second"
            )
        kept = "" if max_tokens == self._budget else "lower rollout.max_new_tokens, which is kept free behind it, "
        remedy = f"{kept}raise trainer.tokens_per_batch, or set data.overlong=drop"
        return Limits(self.source.spec.vocab_size, max_tokens, self.recipe.data.overlong, remedy, self.dropped.append)

    def _loop(self) -> LoopSettings:
        trainer, algorithm = self.recipe.trainer, self.recipe.algorithm
        return LoopSettings(
            steps=trainer.steps,
            seed=trainer.seed,
            rows_per_step=trainer.prompts_per_step,
            shuffle=self.recipe.data.shuffle,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
            aggregation=algorithm.aggregation,
            aggregation_constant=float(self.recipe.rollout.max_new_tokens),
            eval_every=trainer.eval_every,
            save_every=trainer.save_every,
            save_on_stop=trainer.save_on_stop,
            stop_at_reward=trainer.stop_at_reward,
            time_budget_seconds=trainer.time_budget_seconds,
            max_skipped_steps=trainer.max_skipped_steps,
            check_replicas_every=trainer.check_replicas_every,
            progress=self.progress,
        )

    def _run_settings(self) -> RunSettings:
        recipe = self.recipe
        return RunSettings(
            path=Path(recipe.run_dir),
            config=recipe.model_dump(mode="json", by_alias=True),
            config_yaml=recipe.to_yaml(),
            steps=recipe.trainer.steps,
            saves=recipe.trainer.save_every > 0,
            retention=Retention(recipe.trainer.keep, recipe.trainer.keep_every, recipe.trainer.keep_best),
            background=recipe.trainer.async_save,
            evaluates=recipe.trainer.eval_every > 0 and recipe.data.eval is not None,
            resume=self.resume,
            loggers=recipe.trainer.loggers,
            peak_flops=peak_flops(self.device),
            peak_memory_gib=partial(peak_memory_gib, self.device),
            stop_signal=self.stop_signal,
        )
