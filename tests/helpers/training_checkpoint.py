"""A training checkpoint of a tiny model for tests that damage it, crash while it is written, or race for its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dovetail.checkpoint.retention import Retention
from dovetail.checkpoint.writer import Saver
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.run.state import RandomState, RunState, random_state

ROLE = "policy"
OPTIM = OptimSettings(lr=1e-2)


def tiny_engine(source: Path, layout: Layout | None = None, **options: Any) -> Engine:
    """An engine with moments that are not zero."""
    engine = from_pretrained(
        source, layout=layout, device="cpu", options=EngineOptions(optim=OPTIM, **options)
    )
    fill(engine, 0.5)
    return engine


def fill(engine: Engine, value: float) -> None:
    """Have every weight and moment be made of `value`, so that two saves cannot be mixed unseen."""
    moments = engine.optimizer.state_tensors()
    with torch.no_grad():
        for shard in engine.optimizer.shards:
            shard.local.fill_(value)
            moments["exp_avg"][shard.name].fill_(value)
            moments["exp_avg_sq"][shard.name].fill_(value)


def state_of(order: int, step: int, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """The state of a run beside its tensors."""
    rng: list[RandomState] = [random_state(torch.device("cpu"))] * ranks
    state = RunState(
        run_id="r", order=order, step=step, score=1.0, recipe={}, model="m", data="d", cursor=step, updates={ROLE: step},
        before={}, rng=rng,
    )  # fmt: skip
    return {**dict(state), **changes}


def saver_of(engine: Engine, folder: Path, *, keep: int = 10, background: bool = False) -> Saver:
    return Saver(folder, engine.mesh, Retention(keep), background=background)


def save(saver: Saver, engine: Engine, step: int, state: Mapping[str, Any]) -> None:
    """One save, to its end."""
    saver.save(step, engine.export_training(ROLE, with_model=True), engine.origin.auxiliary, state)
    saver.finish()


def write_steps(source: Path, folder: Path, layout: Layout | None = None, steps: int = 2) -> None:
    """A folder with steps 1 .. `steps`; the tensors of step n are made of n. Collective."""
    engine = tiny_engine(source, layout)
    saver = saver_of(engine, folder)
    for step in range(1, steps + 1):
        fill(engine, step)
        save(saver, engine, step, state_of(step, step, engine.mesh["world"].size))
