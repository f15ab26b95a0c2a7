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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dovetail.parallel.layout import Layout

ORDER = ("pp", "dp", "cp", "tp")
TIMEOUT = timedelta(minutes=30)
P2P_MAX_CTAS = 4  # GPU blocks of a waiting pipeline transfer
Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Axis:
    """An axis as this rank sees it; without a group where its size is 1."""

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


class ContextAxes(NamedTuple):
    """cp as a product: `ulysses` exchanges heads for tokens, `gather` shares keys and values."""

    ulysses: Axis = Axis("ulysses")
    gather: Axis = Axis("gather")


class P2PChannel(NamedTuple):
    """A one-way, ordered channel. peer: global rank."""

    peer: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class P2PChannels:
    """The channels to and from neighboring pipeline ranks; virtual stages close the ring."""

    to_next: P2PChannel | None = None
    from_previous: P2PChannel | None = None
    to_previous: P2PChannel | None = None
    from_next: P2PChannel | None = None


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
    channels: P2PChannels = P2PChannels()
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
        make_axis = partial(_axis, rank=rank, timeout=timeout)
        grid = torch.arange(world).view([getattr(layout, name) for name in ORDER])
        groups = {name: _groups(grid, (name,)) for name in ORDER}
        axes = {"world": Axis("world", world, rank, dist.group.WORLD)}
        axes |= {name: make_axis(name, ranks) for name, ranks in groups.items()}
        data = _groups(grid, ("dp", "cp"))
        axes["data"] = make_axis("data", data, always=True)
        axes["fsdp"] = replace(axes["data"], name="fsdp")
        axes["dp_replicate"] = Axis("dp_replicate")
        axes["expert_fsdp"] = axes["fsdp"]
        axes["ep"] = make_axis("ep", _neighbors(data, layout.ep))
        if layout.ep > 1:
            axes["expert_fsdp"] = make_axis("expert_fsdp", _strided(data, layout.ep), always=True)
        stages = groups["pp"]
        ends = [[ranks[0], ranks[-1]] for ranks in stages] if layout.pp > 1 else []
        axes["ends"] = make_axis("ends", ends)
        copies = {}
        for n in _divisors(layout.tp):
            copies[n] = make_axis("copies", _neighbors(groups["tp"], n))
        context = {}
        for n in _divisors(layout.cp):
            ulysses = make_axis("ulysses", _neighbors(groups["cp"], n))
            gather = make_axis("gather", _strided(groups["cp"], n))
            context[n] = ContextAxes(ulysses, gather)
        fsdp = {}
        for name in ("fsdp", "expert_fsdp"):
            group = axes[name].group
            assert group is not None
            fsdp[name] = DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
        channels = _channels(stages, rank, device, timeout, ring=layout.virtual_stages > 1)
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


def _groups(grid: torch.Tensor, names: tuple[str, ...]) -> list[list[int]]:
    """Return the ranks that differ in the coordinates `names` only."""
    dims = [ORDER.index(name) for name in names]
    last = list(range(-len(dims), 0))
    groups: list[list[int]] = grid.movedim(dims, last).flatten(last[0]).flatten(0, -2).tolist()
    return groups


def _neighbors(groups: Groups, n: int) -> list[Sequence[int]]:
    return [ranks[i : i + n] for ranks in groups for i in range(0, len(ranks), n)]


def _strided(groups: Groups, n: int) -> list[Sequence[int]]:
    return [ranks[i::n] for ranks in groups for i in range(n)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _new_group(
    groups: Groups, rank: int, timeout: timedelta, options: Any = None
) -> dist.ProcessGroup:
    """Return the group of disjoint `groups` that has this rank, or one of this rank alone.

    torch names groups by their ranks. Collective over the world.
    """
    ranks = next((ranks for ranks in groups if rank in ranks), [rank])
    return dist.new_group(
        list(ranks), timeout=timeout, pg_options=options, use_local_synchronization=True
    )


def _axis(
    name: str, groups: Groups, *, rank: int, timeout: timedelta, always: bool = False
) -> Axis:
    """Return an axis with a group. always: also of size 1."""
    if not groups or (len(groups[0]) == 1 and not always):
        return Axis(name)
    group = _new_group(groups, rank, timeout)
    for ranks in groups:
        if rank in ranks:
            return Axis(name, len(ranks), ranks.index(rank), group)
    return Axis(name)


def _channels(
    stages: Groups, rank: int, device: torch.device, timeout: timedelta, *, ring: bool
) -> P2PChannels:
    """Make channels for even and odd hops in turn, because neighbors share a rank."""
    size = len(stages[0])
    channels: dict[str, P2PChannel] = {}
    hops = [(i, (i + 1) % size) for i in range(size)]
    if not ring or size == 1:
        hops.pop()
    closing = hops[size - 1 :] if size % 2 else []
    for chosen in (hops[: size - len(closing) : 2], hops[1::2], closing):
        pairs = [(ranks[i], ranks[j]) for ranks in stages for i, j in chosen]
        if not pairs:
            continue
        down = _new_group(pairs, rank, timeout, _channel_options(device, timeout))
        up = _new_group(pairs, rank, timeout, _channel_options(device, timeout))
        for first, second in pairs:
            if rank == first:
                channels["to_next"] = P2PChannel(second, down)
                channels["from_next"] = P2PChannel(second, up)
            if rank == second:
                channels["from_previous"] = P2PChannel(first, down)
                channels["to_previous"] = P2PChannel(first, up)
    return P2PChannels(**channels)


def _channel_options(device: torch.device, timeout: timedelta) -> Any:
    """Return NCCL's options of one group: torch writes its name into them."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = P2P_MAX_CTAS
    options._timeout = timeout  # else torch warns
    return options
