"""Rows, engines and meshes of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from dovetail.data.encode import Tokenizer
from dovetail.data.examples import Limits, Prompt, sequences_of
from dovetail.data.files import Source
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.engine.native import Engine
from dovetail.engine.nonfinite import StepWatch
from dovetail.errors import ConfigError, LayoutError
from dovetail.factory.engine import EngineOptions, make_engine, make_mesh
from dovetail.factory.functions import imported, same_keys
from dovetail.factory.inference_servers import connect
from dovetail.factory.layouts import check_layout
from dovetail.factory.notes import check_experts, cpu_notes, rows_line
from dovetail.factory.rewards import Printed, own_metrics
from dovetail.factory.rows import Given, listed, read_template, sources_of
from dovetail.factory.sampler import longest_row
from dovetail.factory.tokenizer import load_processor, load_tokenizer
from dovetail.inference_servers.fleet import Replica
from dovetail.kernels.reference import wide
from dovetail.launch.inference_servers import server_key, started_servers
from dovetail.launch.progress import Progress, collective_timeout
from dovetail.optim.groups import ParamGroup
from dovetail.optim.optimizer import OptimSettings
from dovetail.optim.rules import check_rule
from dovetail.parallel.consensus import agreed, refuse_different
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import num_ranks
from dovetail.recipe.algorithms import PPO
from dovetail.recipe.data import DataSection
from dovetail.recipe.distillation import TeacherSection
from dovetail.recipe.evaluation import default_metrics
from dovetail.recipe.preferences import Reward
from dovetail.recipe.reward import RewardModelSection
from dovetail.recipe.schema import CriticSection, Recipe, ReferenceSection
from dovetail.recipe.types import LayoutSection
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.rl.evaluation import EvalSet
from dovetail.run.directory import POLICY
from dovetail.run.resume import ROWS, Resumed, refuse_other
from dovetail.run.state import refuse_other_models, rows_fingerprint
from dovetail.weights.hf_directory import Pretrained

RoleSection = CriticSection | ReferenceSection | TeacherSection | RewardModelSection
Parts = tuple[tuple[int, float], ...]  # rows and weight of each part of a mixture
TEMPLATE = "chat_template.jinja"
Engines = dict[str, Engine]  # by the role in a checkpoint
Example = TypeVar("Example")


class RunParts:
    """Collective. resume: auto, never or step=N."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        recipe_folder: Path,
        stop_signal: Callable[[], int],
        resume: str = "auto",
        progress: Progress | None = None,
        dry_run: bool = False,
    ) -> None:
        self.say: Callable[[str], None] | None = None  # of the run
        self.progress = progress or Progress()
        self.recipe = recipe
        self.device = device
        self.recipe_folder = recipe_folder
        self.stop_signal = stop_signal
        self.resume = resume
        self.dry_run = dry_run
        self.resumed: Resumed | None = None
        self.lengths: list[int] = []  # of training rows
        self.parts: Parts = ()  # of a mixture
        self.replicas: list[Replica] = []  # servers that sample
        self.stream: AsyncSampler | None = None  # of an asynchronous run
        self.first_weights = ""  # fingerprint
        self.notes: list[str] = [*recipe.notes]
        self.meshes: dict[Layout, Mesh] = {}
        self.at_close = ExitStack()
        self.printed = Printed()  # by rewards and metrics
        self.mesh = self._mesh(recipe.layout)
        self.dtype = getattr(torch, recipe.model.dtype)
        if self.mesh.device.type == "cpu":
            self.notes += cpu_notes(recipe)
        with agreed(self.mesh):
            trusted = {"trust_remote_code": recipe.model.trust_remote_code}
            self.source = Pretrained.open(recipe.model.path, recipe.model.engine)
            check_layout(self.source.spec, self.mesh.layout)
            self.notes += self.source.notes
            check_experts(recipe, self.source.spec)
            optim = optim_settings(recipe, recipe_folder, recipe.optim.lr, POLICY)
            check_rule(optim.name, optim.options, device, wide(self.dtype))
            self.tokenizer: Tokenizer = load_tokenizer(self.source, **trusted)
            if (template := recipe.data.chat_template) is not None:
                self.tokenizer.chat_template = read_template(template)
                self.source = replace(
                    self.source, auxiliary={**self.source.auxiliary, TEMPLATE: Path(template)}
                )
            self.processor = load_processor(self.source, **trusted)
        refuse_other_models("model.path", self.source, self.mesh)

    def _eval_sets(
        self, prompts: Mapping[str, Sequence[Prompt]], say: Callable[[str], None]
    ) -> list[EvalSet]:
        recipe = self.recipe
        sets = list[EvalSet]()
        named = list(dict.fromkeys(metric for each in recipe.eval.sets for metric in each.metrics))
        seconds = recipe.reward.timeout_seconds
        rest = (say, self.at_close, self.printed)
        own = own_metrics(named, self.mesh, self.recipe_folder, seconds, *rest)
        for each in recipe.eval.sets:
            keys = {
                **same_keys(each, EvalSet),
                "metrics": each.metrics or default_metrics(each.samples),
            }
            sets.append(EvalSet(**keys, prompts=prompts[each.name], own=own))
        return sets

    def _rows(
        self, load: Callable[..., list[Example]]
    ) -> tuple[list[Example], list[Example], dict[str, list[Example]], str]:
        """Rows of data.train, data.eval and eval.sets, and the fingerprint of the first."""
        data = self.recipe.data
        with agreed(self.mesh):
            load = partial(
                load,
                template_options=data.chat_template_kwargs,
                tokenizer=self.tokenizer,
                processor=self.processor,
            )
            rows, self.parts = load_parts(data, data.train, load)
            held_out, _ = load_parts(data, data.eval, load)
            sets = {
                each.name: load_parts(data, each.data, load)[0] for each in self.recipe.eval.sets
            }
            self.recipe = with_epochs(self.recipe, len(rows))
        fingerprint = rows_fingerprint([*rows, *self.parts])
        self.lengths = [len(x.ids) for row in rows for x in sequences_of(row)]
        others = {
            "data.eval": held_out,
            **{f"eval.sets {name}": examples for name, examples in sets.items()},
        }
        prints = {name: rows_fingerprint(examples) for name, examples in others.items()}
        trained = (
            {hash(tuple(x.ids)) for row in rows for x in sequences_of(row)}
            if any(others.values())
            else set()
        )
        for name, examples in others.items():
            if known := sum(
                any(hash(tuple(x.ids)) in trained for x in sequences_of(row)) for row in examples
            ):
                self.notes.append(
                    f"{known} of {len(examples)} rows of {name} are rows of data.train"
                )
        if self.say is not None:
            self.say(rows_line(self.lengths, sum(map(len, others.values()))))
        refuse_different({"data.train": fingerprint, **prints}, self.mesh)
        if self.resumed is not None:
            refuse_other(
                "the rows of data.train",
                self.resumed.state.data,
                fingerprint,
                ROWS[data.overlong_rows],
            )
        return rows, held_out, sets, fingerprint

    def _engines(self) -> list[Replica]:
        """Probed servers, on rank 0."""
        rollout = self.recipe.rollout
        replicas = list[Replica]()
        urls = rollout.engines or started_servers()
        with agreed(self.mesh):
            if not urls and not self.dry_run:
                edit = "start them yourself, and give their URLs as rollout.engines"
                raise ConfigError(
                    "rollout.start: only `dovetail train` without a launcher starts engines; "
                    f"{edit}"
                )
            if self.mesh["world"].rank == 0:
                asleep = rollout.sleep and not self.dry_run  # until weights are loaded
                replicas = connect(
                    self.recipe, urls, server_key(), self.source.spec.vocab_size, asleep=asleep
                )
        return replicas

    def _role(
        self, section: RoleSection, name: str, *, own_words: bool = False
    ) -> tuple[Pretrained, Mesh]:
        key = f"{name}.path"
        path = section.path
        with agreed(self.mesh):
            source = (
                self.source if path is None else Pretrained.open(path, self.recipe.model.engine)
            )
            theirs = source.spec.vocab_size
            ours = self.source.spec.vocab_size
            if theirs < ours and not own_words:
                sizes = f"a vocabulary of {theirs}, but the policy's ids go up to {ours - 1}"
                raise ConfigError(
                    f"{key} {path} has {sizes}; give a model with the policy's tokenizer"
                )
        if path is not None:
            refuse_other_models(key, source, self.mesh)
        self.notes += source.notes
        check = partial(check_layout, source.spec)
        return source, self._mesh(section.layout or self.recipe.layout, f"{name}.layout", check)

    def _trained(self, source: Pretrained, mesh: Mesh, role: str, lr: float) -> Engine:
        recipe, resumed, moe = self.recipe, self.resumed, self.recipe.model.moe
        of_rewards = isinstance(recipe.algorithm, Reward)
        head: Literal["lm", "value"] = "lm" if role == POLICY and not of_rewards else "value"
        if resumed is not None and role not in resumed.state.updates:
            raise ConfigError(
                f"{resumed.reader.path} holds no {role}; start a new run from its weights "
                "(model.path)"
            )
        save_dtype = recipe.model.save_dtype
        options = EngineOptions(
            **same_keys(recipe.trainer, EngineOptions),
            optim=optim_settings(recipe, self.recipe_folder, lr, role),
            recompute=recipe.trainer.activation_checkpointing,
            fresh_head_seed=recipe.trainer.seed,
            head_bias=not of_rewards,
            save_dtype=None if save_dtype is None else getattr(torch, save_dtype),
            balance=BalanceSettings(
                aux_coef=moe.aux_loss_coef, z_coef=moe.z_loss_coef, bias_rate=moe.bias_update_rate
            ),
            resume=None if resumed is None else (resumed.reader, role, resumed.state.updates[role]),
            watch=StepWatch(self.progress, Path(recipe.run_dir) / "faults"),
        )
        return make_engine(source, mesh, self.dtype, head, options)

    def _reward_model(self, section: RewardModelSection) -> tuple[Engine, Tokenizer]:
        source, mesh = self._role(section, "reward.model", own_words=True)
        with agreed(self.mesh):
            tokenizer: Tokenizer = load_tokenizer(
                source, trust_remote_code=self.recipe.model.trust_remote_code
            )
        return make_engine(source, mesh, self.dtype, "value", self._frozen), tokenizer

    @property
    def _frozen(self) -> EngineOptions:
        return EngineOptions(
            master_dtype=self.dtype, tokens_per_batch=self.recipe.trainer.tokens_per_batch
        )

    def _mesh(
        self,
        section: LayoutSection,
        name: str = "layout",
        change: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> Mesh:
        """One mesh per layout."""
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
        """Longest row, padded for any layout."""
        return longest_row(
            self.recipe.trainer.tokens_per_batch, [m.token_multiple for m in self.meshes.values()]
        )

    def _limits(
        self, max_tokens: int, asked: int | None = None, key: str = "data.max_prompt_length"
    ) -> Limits:
        if max_tokens < 1:
            budget = self.recipe.trainer.tokens_per_batch
            edit = "raise the first or lower the second"
            new = f"rollout.max_new_tokens={self.recipe.rollout.max_new_tokens}"
            raise ConfigError(
                f"trainer.tokens_per_batch={budget} leaves no room for a prompt next to {new}; "
                f"{edit}"
            )
        kept = (
            ""
            if max_tokens == self._budget
            else "lower rollout.max_new_tokens, which is kept free behind it, "
        )
        remedy = f"{kept}raise trainer.tokens_per_batch, or set data.overlong_rows=drop"
        if asked is not None and asked < max_tokens:
            max_tokens = asked
            remedy = f"raise {key}, or set data.truncate=left or data.overlong_rows=drop"
        data = self.recipe.data
        say = self.notes.append
        return Limits(
            self.source.spec.vocab_size, max_tokens, data.overlong_rows, remedy, say, data.truncate
        )


def optim_settings(recipe: Recipe, folder: Path, lr: float, role: str) -> OptimSettings:
    """Recipe steps as optimizer steps. Parameter patterns hold for the policy only."""
    optim = recipe.optim
    algorithm = recipe.algorithm
    updates = algorithm.epochs * algorithm.num_mini_batches
    waits = algorithm.critic_warmup if isinstance(algorithm, PPO) and role == POLICY else 0
    own = {} if optim.function is None else {"name": imported(optim.function, folder, "optim.name")}
    groups = tuple(ParamGroup(**dict(group)) for group in optim.groups)
    patterns = (
        {"groups": groups, "frozen": optim.frozen}
        if role == POLICY
        else {"groups": (), "frozen": ()}
    )
    return replace(
        OptimSettings(**{**same_keys(optim, OptimSettings), **patterns, **own}),
        lr=lr,
        warmup_steps=optim.warmup_steps * updates,
        total_steps=max(1, recipe.trainer.steps - waits) * updates,
        decay_steps=None if optim.decay_steps is None else optim.decay_steps * updates,
    )


def load_parts(
    data: DataSection, given: Given, load: Callable[[Source], list[Example]]
) -> tuple[list[Example], Parts]:
    """All examples, and the parts if they have weights."""
    weights = [part.weight for part in listed(given) if part.weight is not None]  # all or none
    loaded = [load(source) for source in sources_of(data, given)]
    examples = [example for part in loaded for example in part]
    return examples, tuple(zip(map(len, loaded), weights, strict=True)) if weights else ()


def with_epochs(recipe: Recipe, num_rows: int) -> Recipe:
    trainer = recipe.trainer
    steps = math.ceil(num_rows * (recipe.data.epochs or 0) / trainer.prompts_per_step)
    changed: dict[str, Any] = {"trainer": trainer.model_copy(update={"steps": steps})}
    return recipe.model_copy(update=changed) if steps else recipe
