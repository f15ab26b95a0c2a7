"""What reaches the update rule: every setting, and the trainable parameters alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.engine.native import Engine
from dovetail.optim.groups import ParamGroup
from dovetail.optim.optimizer import OptimSettings, param_groups, shards_of
from dovetail.optim.rules import make_rule
from dovetail.parallel.mesh import Mesh
from tests.helpers.harness import run
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.parity_reference import make_batch, objective

SETTINGS = OptimSettings(
    lr=2.0,
    betas=(0.8, 0.7),
    eps=1e-3,
    weight_decay=0.5,
    schedule="linear",
    warmup_steps=1,
    total_steps=100,
    min_lr_ratio=0.25,
    decay_steps=4,
)
FROZEN = "norm.weight"


@pytest.mark.parametrize("on_host", [False, True])
def test_every_setting_reaches_the_rule(on_host: bool) -> None:
    settings = OptimSettings(**{**vars(SETTINGS), "on_host": on_host})
    model = nn.Linear(2, 3)
    groups = [ParamGroup("*", settings.lr, settings.weight_decay)]
    made = param_groups(shards_of(model, Mesh.solo()), groups, {})
    decayed, others = make_rule(settings, made).param_groups
    for group in (decayed, others):
        assert (group["lr"], group["betas"], group["eps"]) == (2.0, (0.8, 0.7), 1e-3)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)


def test_every_setting_reaches_the_schedule() -> None:
    assert [SETTINGS.lr * SETTINGS.factor_at(step) for step in range(7)] == [
        1.0,
        2.0,
        1.5,
        1.0,
        0.5,
        0.5,
        0.5,
    ]


def frozen(path: Path) -> None:
    engine = dt.from_pretrained(
        path, device="cpu", options=dt.EngineOptions(optim=OptimSettings(lr=0.1))
    )
    assert isinstance(engine, Engine)
    before = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
    for name, param in engine.model.named_parameters():
        param.requires_grad_(not name.endswith(FROZEN))
    assert not engine.train_step(make_batch(), objective).skipped
    unchanged = {n for n, param in engine.model.named_parameters() if torch.equal(param, before[n])}
    assert unchanged == {name for name in before if name.endswith(FROZEN)} != set()
    trained = {shard.name for shard in engine.optimizer.shards}
    for tensors in engine.optimizer.state_tensors().values():
        assert tensors.keys() == trained
    assert not any(name.endswith(FROZEN) for name in trained)
    state = {name for export in engine.export_training("policy")[1:] for name in export.specs}
    assert state and not any(name.endswith(FROZEN) for name in state)
    engine.check_replicas()


def test_frozen_parameters_are_left_alone(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    run(1, frozen, tmp_path)


def rounded(path: Path) -> None:
    options = dt.EngineOptions(save_dtype=torch.bfloat16)
    engine = dt.from_pretrained(path, device="cpu", options=options)
    model, weights, *_ = engine.export_training("policy", with_model=True)
    assert {spec.dtype for spec in model.specs.values()} == {torch.bfloat16}
    assert weights.specs.keys() == {f"training/policy/param/{name}" for name in model.specs}
    assert {spec.dtype for spec in weights.specs.values()} == {torch.float32}


def test_weights_that_are_saved_rounded_are_training_state_too(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    run(1, rounded, tmp_path)
