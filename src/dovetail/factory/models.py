"""The models of a run: which files and ranks they have, and their engines."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from dovetail.data.encode import Tokenizer
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.engine.native import Engine
from dovetail.engine.nonfinite import StepWatch
from dovetail.errors import ConfigError
from dovetail.factory.engine import EngineOptions, make_engine
from dovetail.factory.layouts import check_layout
from dovetail.factory.setup import Setup, optim_settings
from dovetail.factory.tokenizer import load_tokenizer
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.distillation import TeacherSection
from dovetail.recipe.reward import RewardModelSection
from dovetail.recipe.schema import CriticSection, ReferenceSection
from dovetail.run.directory import POLICY
from dovetail.run.resume import Resumed
from dovetail.run.state import refuse_other_models
from dovetail.weights.hf_directory import Pretrained

RoleSection = CriticSection | ReferenceSection | TeacherSection | RewardModelSection


@dataclass(frozen=True)
class Role:
    """A model of a run, before it is built."""

    source: Pretrained
    mesh: Mesh


def role_of(setup: Setup, section: RoleSection, name: str, *, own_vocabulary: bool = False) -> Role:
    """Opens the files of a model beside the policy, by default the policy's. Collective."""
    key = f"{name}.path"
    path = section.path
    source = setup.source
    with agreed(setup.mesh):
        if path is not None:
            source = Pretrained.open(path, setup.recipe.model.engine)
        theirs = source.spec.vocab_size
        ours = setup.source.spec.vocab_size
        if theirs < ours and not own_vocabulary:
            sizes = f"a vocabulary of {theirs}, but the policy's ids go up to {ours - 1}"
            raise ConfigError(f"{key} {path} has {sizes}; give a model with the policy's tokenizer")
    if path is not None:
        refuse_other_models(key, source, setup.mesh)
    setup.notes.extend(source.notes)
    layout = section.layout or setup.recipe.layout
    mesh = setup.mesh_of(layout, f"{name}.layout", partial(check_layout, source.spec))
    return Role(source, mesh)


def frozen_engine(setup: Setup, role: Role, head: Literal["lm", "value"] = "lm") -> Engine:
    """Builds a model that only scores. Collective."""
    tokens = setup.recipe.trainer.tokens_per_batch
    options = EngineOptions(master_dtype=setup.dtype, tokens_per_batch=tokens)
    return make_engine(role.source, role.mesh, setup.dtype, head, options)


def trained_engine(
    setup: Setup, resumed: Resumed | None, role: Role, name: str, lr: float
) -> Engine:
    """Builds a model that is trained, from its first weights or a checkpoint. Collective."""
    recipe = setup.recipe
    moe = recipe.model.moe
    if resumed is not None and name not in resumed.state.updates:
        raise ConfigError(
            f"{resumed.reader.path} holds no {name}; start a new run from its weights (model.path)"
        )
    save_dtype = recipe.model.save_dtype
    trains_values = recipe.algorithm.trains_values
    options = EngineOptions(
        **recipe.trainer.values_for(EngineOptions),
        optim=optim_settings(recipe, setup.start.folder, lr, name),
        recompute=recipe.trainer.activation_checkpointing,
        fresh_head_seed=recipe.trainer.seed,
        head_bias=not trains_values,
        save_dtype=None if save_dtype is None else getattr(torch, save_dtype),
        balance=BalanceSettings(
            aux_coef=moe.aux_loss_coef, z_coef=moe.z_loss_coef, bias_rate=moe.bias_update_rate
        ),
        resume=None if resumed is None else (resumed.reader, name, resumed.state.updates[name]),
        watch=StepWatch(setup.progress, Path(recipe.run_dir) / "faults"),
    )
    head: Literal["lm", "value"] = "lm" if name == POLICY and not trains_values else "value"
    return make_engine(role.source, role.mesh, setup.dtype, head, options)


def trained_policy(setup: Setup, resumed: Resumed | None) -> Engine:
    role = Role(setup.source, setup.mesh)
    return trained_engine(setup, resumed, role, POLICY, setup.recipe.optim.lr)


def reward_model(setup: Setup, section: RewardModelSection) -> tuple[Engine, Tokenizer]:
    """Builds a reward model, which reads texts with its own tokenizer. Collective."""
    role = role_of(setup, section, "reward.model", own_vocabulary=True)
    trusts = setup.recipe.model.trust_remote_code
    with agreed(setup.mesh):
        tokenizer: Tokenizer = load_tokenizer(role.source, trust_remote_code=trusts)
    return frozen_engine(setup, role, "value"), tokenizer
