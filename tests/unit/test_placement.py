"""Regions of random placements: a rank's rectangles make its parameter, and the owned ones the checkpoint, once."""

import random

import pytest
import torch

from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import (
    Part,
    Placement,
    Split,
    as_index,
    checkpoint_names,
    fsdp_rows,
    held_regions,
    overlap,
    within,
)


def _random_case(rng: random.Random) -> tuple[Placement, tuple[int, ...], Layout]:
    """A placement, the local shape that belongs to it, and a layout."""
    tp, dp, cp = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 5]), rng.choice([1, 2])
    ep = rng.choice([d for d in range(1, dp * cp + 1) if dp * cp % d == 0])
    layout = Layout(tp=tp, dp=dp, cp=cp, ep=ep)
    other = [rng.randint(1, 5) for _ in range(rng.randint(0, 2))]
    kind = rng.choice(["replicated", "column", "row", "vocab", "experts"])
    if kind == "replicated":
        return Placement(), (rng.randint(1, 7), *other), layout
    if kind == "vocab":
        size = rng.randint(1, 20)
        rows = -(-size // tp)
        return (
            Placement((Split(0, "tp", (Part("", size, padding=rows * tp - size),)),)),
            (rows, *other),
            layout,
        )
    if (
        kind == "experts"
    ):  # cut by ep and tp, gate above up in one tensor, or in one for each, or the way down
        local, width = rng.randint(1, 5), rng.randint(1, 3)
        names, dim = rng.choice([(("", ""), 1), (("gate", "up"), 1), (("",), 2)])
        experts = Split(0, "ep", (Part("", local * ep),))
        placement = Placement(
            (experts, Split(dim, "tp", tuple(Part(n, width * tp) for n in names))),
            (),
            "expert_fsdp",
        )
        shape = [local, 3, 4]
        shape[dim] = width * len(names)
        return placement, tuple(shape), layout
    if kind == "row":
        local = rng.randint(1, 4)
        return (
            Placement((Split(1, "tp", (Part("", local * tp),)),)),
            (rng.randint(1, 7), local, *other),
            layout,
        )
    parts = []
    for name in "qkv"[: rng.randint(1, 3)]:
        units = rng.choice([n for n in range(1, 13) if n % tp == 0 or tp % n == 0])
        parts.append(Part(name, units * rng.randint(1, 3), copies=max(1, tp // units)))
    rows = sum(part.local_length(tp) for part in parts)
    return Placement((Split(0, "tp", tuple(parts)),)), (rows, *other), layout


@pytest.mark.parametrize("sharded", [False, True])
def test_regions_cut_and_join(sharded: bool) -> None:
    rng = random.Random(0)
    for _ in range(400):
        placement, local_shape, layout = _random_case(rng)
        names = checkpoint_names("a.fused.weight", placement)
        shapes: dict[str, tuple[int, ...]] = {}
        rebuilt: dict[str, torch.Tensor] = {}
        times: dict[str, torch.Tensor] = {}
        for rank in range(layout.num_ranks):
            mesh = Mesh.abstract(layout, rank)
            found = held_regions("a.fused.weight", placement, local_shape, mesh, sharded=sharded)
            axis = mesh[placement.sharded_over]
            rows = (
                fsdp_rows(local_shape[0], axis.rank, axis.size) if sharded else (0, local_shape[0])
            )
            filled = torch.zeros(rows[1] - rows[0], *local_shape[1:], dtype=torch.int64)
            for region in found:
                name = region.checkpoint_name
                assert shapes.setdefault(name, region.checkpoint_shape) == region.checkpoint_shape
                whole = 1 + torch.arange(torch.Size(shapes[name]).numel()).view(shapes[name])
                assert not filled[as_index(region.local_slice)].any()
                filled[as_index(region.local_slice)] = whole[as_index(region.checkpoint_slice)]
                if region.owned:
                    out = rebuilt.setdefault(name, torch.zeros_like(whole))
                    out[as_index(region.checkpoint_slice)] = filled[as_index(region.local_slice)]
                    times.setdefault(name, torch.zeros_like(whole))[
                        as_index(region.checkpoint_slice)
                    ] += 1
            if not any(part.padding for split in placement.splits for part in split.parts):
                assert filled.all()
        assert set(shapes) == set(names)
        for name, shape in shapes.items():
            assert torch.equal(
                rebuilt[name], 1 + torch.arange(torch.Size(shape).numel()).view(shape)
            )
            assert (times[name] == 1).all()


def test_overlap_and_within() -> None:
    first, second = ((0, 4), (2, 6)), ((3, 9), (0, 3))
    assert overlap(first, second) == ((3, 4), (2, 3))
    assert within(((3, 4), (2, 3)), second) == ((0, 1), (2, 3))
    assert overlap(first, ((4, 9), (0, 9))) is None
    assert overlap((), ()) == ()
