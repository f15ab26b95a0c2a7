"""Checkpoints that another layout reads."""

from pathlib import Path

from dovetail.checkpoint.writer import write_sharded
from dovetail.engine.native import Engine
from tests.helpers.resumed_runs import inputs as inputs

ROLE = "policy"


def save(engine: Engine, path: Path) -> None:
    exports = engine.export_training(ROLE, with_model=True)
    specs = [spec for export in exports for spec in export.specs.values()]
    mine = {name: piece for export in exports for name, piece in export.local.items()}
    mesh = engine.mesh
    state = {"updates": engine.updates}
    write_sharded(
        path, mesh, specs, {mesh["world"].rank: mine}, mesh.layout, auxiliary={}, state=state
    )
