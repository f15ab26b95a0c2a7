"""Saves of a few small tensors by one or more processes that need no model: what crash tests repeat by the hundred."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import Retention, clear_debris, open_newest
from dovetail.checkpoint.writer import Saver
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Region, Slices
from dovetail.weights.safe_paths import LEFTOVERS
from dovetail.weights.safetensors import TensorSpec
from dovetail.weights.shards import ParamShard
from dovetail.weights.stream import Export
from tests.helpers.training_checkpoint import state_of

ROWS, WIDTH = 8, 6
NAMES = ("a.weight", "training/policy/param/a.weight", "training/policy/exp_avg/a.weight")
SIDES: Mapping[str, bytes] = {
    "config.json": b"{}\n",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
}


def mesh_of(world: int) -> Mesh:
    return Mesh.solo() if world == 1 else Mesh.build(Layout(dp=world))


def export_of(tensors: Mapping[str, Tensor], rank: int, world: int) -> Export:
    """Every rank owns its rows of each tensor, and `tensors` are those rows."""
    specs, mine = {}, {}
    owners: dict[str, list[tuple[int, Slices]]] = {}
    rows = ROWS // world
    for name, tensor in tensors.items():
        specs[name] = TensorSpec(name, torch.float32, (ROWS, WIDTH))
        owners[name] = [(r, ((r * rows, (r + 1) * rows), (0, WIDTH))) for r in range(world)]
        where = owners[name][rank][1]
        region = Region(name, (ROWS, WIDTH), where, ((0, rows), (0, WIDTH)), True, 1)
        mine[name] = [ParamShard(region, torch.float32, lambda tensor=tensor: tensor)]  # type: ignore[misc]
    return Export(specs, owners, mine)


def made_of(value: float, world: int) -> dict[str, Tensor]:
    return {name: torch.full((ROWS // world, WIDTH), float(value)) for name in NAMES}


class Run:
    """One rank of a run that saves: the tensors of its n-th save are made of n."""

    def __init__(
        self, folder: Path, world: int = 1, *, keep: int = 10, background: bool = False
    ) -> None:
        self.mesh = mesh_of(world)
        self.saver = Saver(folder, self.mesh, Retention(keep), background=background)

    def save(self, step: int, order: int) -> None:
        world = self.mesh["world"]
        export = export_of(made_of(order, world.size), world.rank, world.size)
        self.saver.save(step, [export], SIDES, state_of(order, step, world.size))
        self.saver.finish()


def order_of(reader: ShardedReader) -> int:
    """Which save a checkpoint is, having checked that every element comes from that one."""
    (found,) = {float(x) for name in NAMES for x in reader.read(name).unique()}
    assert reader.manifest.state is not None
    assert reader.manifest.state["order"] == found
    return int(found)


def recovered(folder: Path) -> tuple[int, int]:
    """(step, order) that a run would go on from; then it starts: no debris is left, and it can save."""
    reader, _ = open_newest(folder, Mesh.solo())
    assert reader is not None
    reader.verify()
    found = (reader.manifest.step or 0, order_of(reader))
    clear_debris(folder)
    assert not [path for pattern in LEFTOVERS for path in folder.glob(pattern)]
    Run(folder).save(50, 50)
    reader, _ = open_newest(folder, Mesh.solo())
    assert reader is not None and order_of(reader) == 50
    assert (folder / "step_000050").resolve() == reader.path.resolve()
    return found
