"""The parallel axes of a model and their process groups.

pp is outermost, then dp, cp, tp, and some axes join or divide these:

data          dp x cp: the ranks that see other tokens with the same layers and heads
fsdp          the ranks of `data` that share the rows of a parameter among them
dp_replicate  the ranks of `data` that hold the same rows; data = dp_replicate x fsdp
ep            the neighbors in `data` that hold different experts
expert_fsdp   the ranks of `data` that share the rows of the same experts among them
ends          the first and the last pipeline rank, for tied tables

In every layout `fsdp` is all of `data` today, and dp_replicate is 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dovetail.parallel.axes import (
    ORDER,
    TIMEOUT,
    Axis,
    ContextAxes,
    P2PChannels,
    divisors,
    make_axis,
    make_channels,
    neighbors,
    ranks_along,
    strided,
)
from dovetail.parallel.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """All axes of a layout.

    copies[n]: n neighboring tp ranks with the same KV heads.
    context[u]: cp as u (Ulysses) x cp / u (gather).
    """

    layout: Layout
    device: torch.device
    axes: Mapping[str, Axis]
    copies: Mapping[int, Axis]
    fsdp: Mapping[str, DeviceMesh] = field(default_factory=dict)
    context: Mapping[int, ContextAxes] = field(default_factory=lambda: {1: ContextAxes()})
    channels: P2PChannels = field(default_factory=P2PChannels)
    timeout: timedelta = TIMEOUT

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def coords(self) -> dict[str, int]:
        return {name: axis.rank for name, axis in self.axes.items()}

    def on_host(self) -> "Mesh":
        """Return a mesh on the CPU with a gloo group of its own as its world. Collective."""
        world = self["world"]
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=self.timeout)
            world = replace(world, group=group)
        axes = {**self.axes, "world": world}
        return replace(self, device=torch.device("cpu"), axes=axes)

    @property
    def token_multiple(self) -> int:
        cp = self["cp"].size
        halves = 2 * cp if cp > 1 else 1
        return self["tp"].size * halves

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> "Mesh":
        return cls.abstract(Layout(), 0, device)

    @classmethod
    def abstract(cls, layout: Layout, rank: int, device: torch.device | str = "meta") -> "Mesh":
        """Return one rank of a layout, without groups."""
        sizes = {name: int(getattr(layout, name)) for name in ORDER}
        sizes["data"] = sizes["dp"] * sizes["cp"]
        sizes["fsdp"] = sizes["data"]
        sizes["dp_replicate"] = 1
        sizes["ep"] = layout.ep
        sizes["expert_fsdp"] = sizes["data"] // layout.ep
        sizes["world"] = layout.num_ranks
        coords = _coords_of(rank, sizes)
        at_end = layout.pp > 1 and coords["pp"] in (0, layout.pp - 1)
        sizes["ends"] = 2 if at_end else 1
        coords["ends"] = int(at_end and coords["pp"] > 0)
        axes = {name: Axis(name, size, coords[name]) for name, size in sizes.items()}
        return cls(layout, torch.device(device), axes, {1: Axis("copies")})

    @classmethod
    def build(
        cls, layout: Layout, device: torch.device | str = "cpu", timeout: timedelta = TIMEOUT
    ) -> "Mesh":
        """Return this rank's mesh. timeout: of all axes but the world. Collective."""
        world = dist.get_world_size()
        rank = dist.get_rank()
        layout = layout.resolve(world)
        device = torch.device(device)
        new_axis = partial(make_axis, rank=rank, timeout=timeout)
        grid = torch.arange(world).view([getattr(layout, name) for name in ORDER])
        groups = {name: ranks_along(grid, (name,)) for name in ORDER}
        axes = {"world": Axis("world", world, rank, dist.group.WORLD)}
        axes |= {name: new_axis(name, ranks) for name, ranks in groups.items()}
        data = ranks_along(grid, ("dp", "cp"))
        axes["data"] = new_axis("data", data, always=True)
        axes["fsdp"] = replace(axes["data"], name="fsdp")
        axes["dp_replicate"] = Axis("dp_replicate")
        axes["expert_fsdp"] = axes["fsdp"]
        axes["ep"] = new_axis("ep", neighbors(data, layout.ep))
        if layout.ep > 1:
            axes["expert_fsdp"] = new_axis("expert_fsdp", strided(data, layout.ep), always=True)
        stages = groups["pp"]
        ends = [[ranks[0], ranks[-1]] for ranks in stages] if layout.pp > 1 else []
        axes["ends"] = new_axis("ends", ends)
        copies = {}
        for n in divisors(layout.tp):
            copies[n] = new_axis("copies", neighbors(groups["tp"], n))
        context = {}
        for n in divisors(layout.cp):
            ulysses = new_axis("ulysses", neighbors(groups["cp"], n))
            gather = new_axis("gather", strided(groups["cp"], n))
            context[n] = ContextAxes(ulysses, gather)
        fsdp = {}
        for name in ("fsdp", "expert_fsdp"):
            group = axes[name].group
            assert group is not None
            fsdp[name] = DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
        channels = make_channels(stages, rank, device, timeout, ring=layout.virtual_stages > 1)
        return cls(layout, device, axes, copies, fsdp, context, channels, timeout)


def _coords_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    coords = {"world": rank}
    rest = rank
    for name in reversed(ORDER):
        rest, coords[name] = divmod(rest, sizes[name])
    coords["data"] = coords["dp"] * sizes["cp"] + coords["cp"]
    coords["fsdp"] = coords["data"]
    coords["dp_replicate"] = 0
    coords["expert_fsdp"], coords["ep"] = divmod(coords["data"], sizes["ep"])
    return coords
