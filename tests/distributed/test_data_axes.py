"""Who holds which tokens is another axis than who holds which rows of a parameter.

No layout has them apart yet, so the mesh is built here: two replicas (`dp_replicate`) of two shards (`fsdp`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dovetail.factory.engine import EngineOptions, make_engine
from dovetail.parallel.axes import Axis
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.harness import run
from tests.helpers.matrix import (
    BALANCE,
    FLAT,
    STEP,
    Case,
    Figures,
    figures_of,
    make_batch,
    measure,
    path_of,
    write_alone,
    write_models,
)
from tests.helpers.tolerances import SUM_ORDER

NAMES = ("dp_replicate", "fsdp")
MODELS = ("qwen2_tied", "qwen3_moe")
RANKS = 4


def hybrid_mesh(replicas: int, shards: int) -> Mesh:
    """Replicas of shards, in place of shards alone."""
    mesh = Mesh.build(Layout(dp=replicas * shards))
    grid = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=NAMES)
    coords = divmod(dist.get_rank(), shards)
    axes = dict(mesh.axes)
    for name, size, rank in zip(NAMES, (replicas, shards), coords, strict=True):
        axes[name] = Axis(name, size, rank, grid.get_group(name))
    axes["expert_fsdp"] = axes["fsdp"]
    return replace(mesh, axes=axes, fsdp={"fsdp": grid})


def trained(folder: str, case: Case, replicas: int, shards: int) -> tuple[dict[str, Any], float]:
    """What a step shows, and how far ranks that hold the same rows are apart."""
    mesh = hybrid_mesh(replicas, shards)
    source = Pretrained.open(path_of(folder, case.model, case.depth))
    options = EngineOptions(optim=STEP, balance=BALANCE)
    engine = make_engine(source, mesh, torch.float64, "lm", options)
    found, stray = measure(engine, make_batch(case, torch.float64), case.loss)
    for shard in engine.optimizer.shards:  # rows, not whole tensors
        assert len(shard.local) < len(shard.source) or len(shard.source) < shards
    engine.check_replicas()
    return found, stray


def distance(folder: str, case: Case, replicas: int, shards: int) -> Figures:
    """How far a hybrid mesh is from one rank, whose figures `write_alone` wrote."""
    expected = torch.load(Path(folder) / f"{case}-{case.depth}.pt", weights_only=False)
    return figures_of(*trained(folder, case, replicas, shards), expected)


@pytest.mark.parametrize("model", MODELS)
def test_replicas_of_shards_train_as_one_rank(model: str, tmp_path: Path) -> None:
    case = Case(model, depth=FLAT)
    write_models(tmp_path, [model], FLAT)
    run(1, write_alone, str(tmp_path), [case])
    for figures in run(RANKS, distance, str(tmp_path), case, 2, 2):
        assert figures.worst < SUM_ORDER
        assert figures.stray == 0.0
