"""Axes and channels of a mesh, and the process groups that they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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


def ranks_along(grid: torch.Tensor, names: tuple[str, ...]) -> list[list[int]]:
    """Return the ranks that differ in the coordinates `names` only."""
    dims = [ORDER.index(name) for name in names]
    last = list(range(-len(dims), 0))
    groups: list[list[int]] = grid.movedim(dims, last).flatten(last[0]).flatten(0, -2).tolist()
    return groups


def neighbors(groups: Groups, n: int) -> list[Sequence[int]]:
    return [ranks[i : i + n] for ranks in groups for i in range(0, len(ranks), n)]


def strided(groups: Groups, n: int) -> list[Sequence[int]]:
    return [ranks[i::n] for ranks in groups for i in range(n)]


def divisors(n: int) -> list[int]:
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


def make_axis(
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


def make_channels(
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
