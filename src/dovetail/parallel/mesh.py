"""Who talks to whom: the named axes of one model over the ranks of a job. Built once, passed down, never global.

Ranks are numbered with pp outermost, then dp, cp and tp, so tp ranks are neighbors. `fsdp` is dp x cp merged: the
ranks over which FSDP2 shards parameters. Of these `ep` neighbors hold different experts, and `expert_fsdp` are the ranks
that hold the same ones, over which FSDP2 shards those. `ends` joins the first and the last pipeline rank, which both hold a tied
table. `world` is every rank. Meshes of different layouts may live in one job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dovetail.parallel.layout import Layout
from dovetail.parallel.peers import Peers

ORDER = ("pp", "dp", "cp", "tp")
USES = ("gathers", "sums")  # of the axes fsdp and expert_fsdp
Reach = Callable[["Axis", Mapping[str, "Axis"]], Mapping[str, Peers]]
PATIENCE = timedelta(minutes=30)  # of a rank that waits for others
ROAD_BLOCKS = 4  # of a GPU that a transfer between pipeline ranks may occupy while it waits for its other end


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this rank sees it. One of size 1 needs no group, and its collectives are the identity.

    peers: other ways than the group's for large tensors, where there are any.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    peers: Peers | None = None


class ContextAxes(NamedTuple):
    """The cp axis as a product: neighbors exchange heads for tokens, lines across them gather keys and values."""

    ulysses: Axis = Axis("ulysses")
    gather: Axis = Axis("gather")


class P2PChannel(NamedTuple):
    """A one-way road between two pipeline ranks: what is sent on it arrives in that order, and nothing comes back."""

    peer: int  # the rank in the job at the other end
    group: dist.ProcessGroup


@dataclass(frozen=True)
class P2PChannels:
    """The roads of one pipeline rank: activations go to the next rank, gradients to the previous one.

    With virtual stages the last rank's next is the first; without, those two roads are None. Each has a group of its
    own, so that nothing crosses where the previous and the next rank are the same.
    """

    to_next: P2PChannel | None = None
    from_previous: P2PChannel | None = None
    to_previous: P2PChannel | None = None
    from_next: P2PChannel | None = None


@dataclass(frozen=True)
class Mesh:
    """The axes of one model.

    `rings` are other ways between the ranks of some axes, where there are any: one for tp, one for cp with cp_mode gather, one
    for each of `USES` of FSDP2's.
    `copies[n]` are the groups of n neighboring tp ranks that hold the same KV heads; `context[u]` is cp as u (Ulysses)
    x cp / u (gather); which n and u a model takes follows from its heads.
    """

    layout: Layout
    device: torch.device
    axes: Mapping[str, Axis]
    copies: Mapping[int, Axis]
    fsdp: Mapping[str, DeviceMesh] = field(default_factory=dict)  # of the axes fsdp and expert_fsdp
    context: Mapping[int, ContextAxes] = field(default_factory=lambda: {1: ContextAxes()})
    links: P2PChannels = P2PChannels()
    rings: Mapping[str, Peers] = field(default_factory=dict)
    patience: timedelta = PATIENCE  # after which who waits in a collective gives up

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def coords(self) -> dict[str, int]:
        """This rank's place on every axis, by name."""
        return {name: axis.rank for name, axis in self.axes.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, by name."""
        return {name: axis.size for name, axis in self.axes.items()}

    def on_host(self) -> "Mesh":
        """The same mesh for talk between hosts: its world has a gloo group of its own, as patient. Collective."""
        world = self["world"]
        group = None if world.size == 1 else dist.new_group(backend="gloo", timeout=self.patience)
        return replace(self, device=torch.device("cpu"), axes={**self.axes, "world": replace(world, group=group)})

    @property
    def token_multiple(self) -> int:
        """What the number of packed tokens must be a multiple of."""
        return self["tp"].size * (2 * self["cp"].size if self["cp"].size > 1 else 1)

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> "Mesh":
        """The mesh of one process without any group: every axis has size 1. For a model that FSDP does not wrap."""
        return cls.imagined(Layout(), 0, device)

    @classmethod
    def imagined(cls, layout: Layout, rank: int, device: torch.device | str = "meta") -> "Mesh":
        """The mesh of one rank of a layout whose dp is known, as far as shapes need it: without any group."""
        sizes = {name: int(getattr(layout, name)) for name in ORDER}
        data = sizes["dp"] * sizes["cp"]
        sizes |= {"fsdp": data, "ep": layout.ep, "expert_fsdp": data // layout.ep, "world": layout.num_ranks}
        coords = coords_of(rank, sizes)
        at_end = layout.pp > 1 and coords["pp"] in (0, layout.pp - 1)
        sizes["ends"], coords["ends"] = 2 if at_end else 1, int(at_end and coords["pp"] > 0)
        axes = {name: Axis(name, size, coords[name]) for name, size in sizes.items()}
        return cls(layout, torch.device(device), axes, {1: Axis("copies")})

    @classmethod
    def build(
        cls,
        layout: Layout,
        device: torch.device | str = "cpu",
        reach: Reach = lambda *_: {},
        patience: timedelta = PATIENCE,
    ) -> "Mesh":
        """Split the default process group into axes. Collective: every rank calls it, with the same layout.

        reach: what makes another way between the ranks of the axes given to it, by name, where there is one. It gets the
            world first, over which it is collective. patience: after which who waits in a collective of any axis gives up;
            the world's is that of the default group.
        """
        world, me = dist.get_world_size(), dist.get_rank()
        make_axis = partial(_axis, patience=patience)
        layout = layout.resolve(world)
        device = torch.device(device)
        grid = torch.arange(world).view([getattr(layout, name) for name in ORDER])
        axes = {"world": Axis("world", world, me, dist.group.WORLD)}
        for name in ORDER:
            axes[name] = make_axis(name, _lines(grid, (name,)), me)
        data = _lines(grid, ("dp", "cp"))
        axes["fsdp"] = make_axis("fsdp", data, me, always=True)
        axes["ep"] = make_axis("ep", _neighbors(data, layout.ep), me)
        axes["expert_fsdp"] = axes["fsdp"]
        if layout.ep > 1:
            shared = [line[i :: layout.ep] for line in data for i in range(layout.ep)]
            axes["expert_fsdp"] = make_axis("expert_fsdp", shared, me, always=True)
        pp_lines = _lines(grid, ("pp",))
        axes["ends"] = make_axis("ends", [[line[0], line[-1]] for line in pp_lines if len(line) > 1], me)
        tp_lines = _lines(grid, ("tp",))
        copies = {n: make_axis("copies", _neighbors(tp_lines, n), me) for n in _divisors(layout.tp)}
        cp_lines = _lines(grid, ("cp",))
        context = {
            u: ContextAxes(
                make_axis("ulysses", _neighbors(cp_lines, u), me),
                make_axis("gather", [line[i::u] for line in cp_lines for i in range(u)], me),
            )
            for u in _divisors(layout.cp)
        }
        fsdp = {}
        for name in ("fsdp", "expert_fsdp"):
            group = axes[name].group
            assert group is not None
            fsdp[name] = DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
        links = _links(pp_lines, me, device, patience, ring=layout.virtual_stages > 1)
        used = {
            "tp": axes["tp"],
            **({"cp": context[1].gather} if layout.cp_mode == "gather" else {}),
            **{f"{name} {use}": axes[name] for name in fsdp for use in USES},
        }
        if layout.ep == 1:
            used = {name: axis for name, axis in used.items() if not name.startswith("expert")}
        rings = reach(axes["world"], used)
        axes["tp"] = replace(axes["tp"], peers=rings.get("tp"))
        context[1] = context[1]._replace(gather=replace(context[1].gather, peers=rings.get("cp")))
        return cls(layout, device, axes, copies, fsdp, context, links, rings, patience)


def coords_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The place of any rank on the axes of `ORDER`, and on those made of them: the inverse of the rank order."""
    found, rest = {"world": rank}, rank
    for name in reversed(ORDER):
        rest, found[name] = divmod(rest, sizes[name])
    found["fsdp"] = found["dp"] * sizes["cp"] + found["cp"]
    found["expert_fsdp"], found["ep"] = divmod(found["fsdp"], sizes["ep"])
    return found


def _lines(grid: torch.Tensor, names: tuple[str, ...]) -> list[list[int]]:
    """The groups of ranks that differ only along `names`."""
    dims = [ORDER.index(name) for name in names]
    length = prod(grid.shape[d] for d in dims)
    lines: list[list[int]] = grid.movedim(dims, list(range(-len(dims), 0))).reshape(-1, length).tolist()
    return lines


def _neighbors(lines: list[list[int]], n: int) -> list[list[int]]:
    """Each line cut into groups of n neighbors."""
    return [line[i : i + n] for line in lines for i in range(0, len(line), n)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _axis(name: str, lines: list[list[int]], me: int, *, patience: timedelta, always: bool = False) -> Axis:
    """This rank's axis among `lines`. `new_group` is collective, so every rank makes every group."""
    mine = Axis(name)
    for line in lines:
        group = dist.new_group(line, timeout=patience) if len(line) > 1 or always else None
        if me in line:
            mine = Axis(name, len(line), line.index(me), group)
    return mine


def _links(lines: list[list[int]], me: int, device: torch.device, patience: timedelta, *, ring: bool) -> P2PChannels:
    """This rank's roads along its line. Every rank makes every road, in the same order."""
    mine: dict[str, P2PChannel] = {}
    for line in lines:
        hops = list(pairwise(line)) + ([(line[-1], line[0])] if ring else [])
        for first, second in hops if len(line) > 1 else ():
            options = (_road_options(device, patience) for _ in range(2))
            down, up = (dist.new_group([first, second], timeout=patience, pg_options=each) for each in options)
            if me == first:
                mine |= {"to_next": P2PChannel(second, down), "from_next": P2PChannel(second, up)}
            if me == second:
                mine |= {"from_previous": P2PChannel(first, down), "to_previous": P2PChannel(first, up)}
    return P2PChannels(**mine)


def _road_options(device: torch.device, patience: timedelta) -> Any:
    """NCCL's of one road; they are not shared, torch writes the group's name into them. Other backends have none."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ROAD_BLOCKS
    options._timeout = patience  # as given to `new_group`; torch warns where they differ
    return options
