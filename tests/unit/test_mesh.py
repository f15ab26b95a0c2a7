"""Process groups of a mesh: each rank makes its own, under names that all members share; any number of ranks, simulated."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from tests.helpers.harness import Apart

LARGE = Layout(tp=4, pp=4, cp=4, dp=16)
SECONDS = 5.0
LAYOUTS = (
    Layout(tp=2, pp=3, cp=2, dp=4, ep=4, virtual_stages=2),  # a ring of odd length
    Layout(tp=4, pp=4, dp=3),
    Layout(tp=2, pp=2, dp=12, virtual_stages=2),
    Layout(dp=48),
)
Made = list[tuple[str, list[int]]]  # name and ranks of each group, in order


@contextmanager
def recorded(rank: int, world: int) -> Iterator[Made]:
    """The groups that one rank makes, of a job whose other ranks do not exist."""
    made: Made = []
    original = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        group = original(ranks, **options)
        made.append((group.group_name, sorted(ranks)))
        return group

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with mock.patch.object(dist, "new_group", new_group):
            yield made
    finally:
        dist.destroy_process_group()


def large() -> list[tuple[float, Made, dict[str, int]]]:
    """Of a rank in the middle and one at the end: seconds, groups, and sizes of the axes."""
    found = []
    for rank in (517, LARGE.num_ranks - 1):
        with recorded(rank, LARGE.num_ranks) as made:
            before = time.process_time()
            mesh = Mesh.build(LARGE)
            found.append(
                (
                    time.process_time() - before,
                    made,
                    {name: axis.size for name, axis in mesh.axes.items()},
                )
            )
    return found


def all_ranks() -> dict[int, Made]:
    """The groups of every rank, which builds one mesh after the other."""
    world, found = LAYOUTS[0].num_ranks, {}
    for rank in range(world):
        with recorded(rank, world) as made:
            for layout in LAYOUTS:
                mesh = Mesh.build(layout)
                groups = {axis.group for axis in mesh.axes.values()} - {None}
                assert all(
                    dist.get_process_group_ranks(group)[dist.get_rank(group)] == rank
                    for group in groups
                )
            found[rank] = made
    return found


def test_a_rank_of_1024_makes_its_own_groups_alone() -> None:
    apart = Apart()
    try:
        (middle, end) = apart(large)
    finally:
        apart.end()
    for rank, (seconds, made, sizes) in zip((517, 1023), (middle, end), strict=True):
        assert seconds < SECONDS
        assert all(rank in ranks for _, ranks in made)
        assert sizes["fsdp"] == 64 and sizes["world"] == 1024
    # pp, dp, cp, tp, fsdp; ends; copies of 2 and 4; gather, 2 x 2, ulysses of cp; 4 channels
    assert len(middle[1]) == len(end[1]) == 5 + 1 + 2 + 4 + 4


def test_members_make_a_group_under_one_name_in_one_order() -> None:
    """Or they would wait for each other: also with pipelines, whose ends have fewer groups, and several meshes in one job."""
    apart = Apart()
    try:
        made = apart(all_ranks)
    finally:
        apart.end()
    makers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, groups in made.items():
        assert len({name for name, _ in groups}) == len(groups)
        for number, (name, _) in enumerate(groups):
            makers[name, number].append(rank)
    for groups in made.values():
        for number, (name, ranks) in enumerate(groups):
            assert makers[name, number] == ranks
