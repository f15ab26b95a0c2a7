"""Micro-batches as two halves: which are cut, what lies where in them, and in which order their layers take turns."""

from itertools import product
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from bench.engines import spec_of
from dovetail.batch.balancing import balanced_split
from dovetail.batch.micro import MIN_HALF_TOKENS, ContextShard, DualBatch, MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.factory.engine import make_decoder
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import Handle
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncCollective, AsyncForward, interleave, run_sync

LENGTHS = (5, 3, 9, 2, 7)


def test_halves_are_as_alike_as_sequences_allow() -> None:
    assert [
        balanced_split(lengths) for lengths in (LENGTHS, (1, 1), (9, 1, 1), (1, 1, 9), (4, 4, 4, 4))
    ] == [
        3,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("share", "tp"),
    [
        *product(
            [ContextShard(), ContextShard(0, 2, 1), ContextShard(1, 2, 1), ContextShard(1, 2, 2)],
            (1, 2, 4),
        )
    ],
)
def test_rows_of_a_rank_are_those_of_its_halves(share: ContextShard, tp: int) -> None:
    """Between blocks a rank of tp has its tokens of the first half, then those of the second; what counts is as if whole."""
    draw = torch.Generator().manual_seed(1)
    batch = PackedBatch.pack([torch.randint(90, (n,), generator=draw) for n in LENGTHS])
    batch = batch.with_mask(batch.mask & (torch.rand(len(batch), generator=draw) < 0.7))
    micro, multiple = MicroBatch.halved(batch, 2, 16, share, tp), 16
    first, second = micro.halves
    assert micro.first == 8 and [len(half.batch) for half in micro.halves] == [16, 32]
    assert len(micro) == len(first) + len(second) and len(micro) % (multiple // share.size) == 0
    for rank in range(tp):
        rows = torch.cat([half.tokens.chunk(tp)[rank] for half in micro.halves])
        assert torch.equal(micro.tokens.chunk(tp)[rank], rows)
        placed = micro.order.chunk(tp)[rank]
        assert torch.equal(micro.batch.tokens[placed], rows)
    real = micro.order < len(batch)
    assert sorted(micro.order.tolist()) == sorted(set(micro.order.tolist()))
    assert (
        int(micro.batch.mask[micro.order[~real]].sum()) == 0
    )  # padding lies behind all tokens, and does not count
    both = torch.cat([half.counted.targets for half in micro.halves])
    assert torch.equal(micro.counted.targets, both) and torch.equal(
        micro.batch.targets[micro.order[micro.index]], both
    )
    assert torch.equal(micro.all_counted.targets[micro.local], both)
    counts = micro.counted.cu_seqlens.diff()[: len(LENGTHS)]
    per_half = [
        half.counted.cu_seqlens.diff()[:n] for half, n in zip(micro.halves, (2, 3), strict=True)
    ]
    assert torch.equal(counts, torch.cat(per_half))


def test_cut_is_what_every_replica_can_cut() -> None:
    halving = DualBatch(4)
    assert halving.should_split([LENGTHS, (4, 4)])
    assert not halving.should_split([LENGTHS, (8,)])  # one sequence
    assert not halving.should_split([LENGTHS, (9, 3)])  # too small a half
    assert not halving.should_split([LENGTHS, ()])  # a replica without any
    assert not DualBatch(None).should_split([LENGTHS])
    assert halving.should_split([LENGTHS], 8, 40) and not halving.should_split(
        [LENGTHS], 8, 39
    )  # 24 + 16 with padding


class Axes(SimpleNamespace):
    """As much of a mesh as the rule looks at."""

    def __getitem__(self, name: str) -> Axis:
        return Axis(name, self.sizes.get(name, 1))


def test_layers_over_tp_take_turns_on_accelerators() -> None:
    model = make_decoder(spec_of("tiny"), Mesh.solo("meta"), torch.float32)
    for device, sizes, given, least in (
        ("cuda", {"tp": 2}, None, MIN_HALF_TOKENS),
        ("cuda", {"tp": 2, "ep": 2}, None, None),
        ("cuda", {"ep": 8}, None, None),
        ("cuda", {}, None, None),
        ("cpu", {"tp": 2}, None, None),
        ("cpu", {"tp": 2}, True, 1),
        ("cuda", {"tp": 2}, False, None),
    ):
        mesh: Any = Axes(device=torch.device(device), sizes=sizes)
        assert DualBatch.of(model.supports_dual_batch, mesh, given) == DualBatch(least), (
            device,
            sizes,
            given,
        )


def test_a_collective_does_not_keep_its_results() -> None:
    """Autograd keeps it until the backward pass ends."""
    collective = AsyncCollective(lambda x: Handle(x + 1), lambda grad: Handle(2 * grad))
    collective.start(torch.zeros(3))
    collective.start_backward(torch.ones(3), torch.Size([3]))
    came, back = collective.wait(), collective.wait_backward()
    assert (came.tolist(), back.tolist()) == ([1.0] * 3, [2.0] * 3)
    held = ref(came), ref(back)
    del came, back
    assert [each() for each in held] == [None, None]


def layer(name: str, turns: int, told: list[str]) -> AsyncForward[str]:
    for turn in range(turns):
        told.append(f"{name}{turn}")
        yield
    told.append(f"{name}.")
    return name


def test_turns_alternate_and_the_first_is_ahead() -> None:
    for ahead, order in ((0, "a0 b0 a1 b1 a. b."), (1, "a0 a1 b0 a. b1 b.")):
        told: list[str] = []
        assert interleave([layer("a", 2, told), layer("b", 2, told)], ahead) == ("a", "b")
        assert told == order.split()
    told = []
    assert interleave([layer("a", 2, told)], 1) == ("a",) and run_sync(layer("b", 1, told)) == "b"
    assert told == ["a0", "a1", "a.", "b0", "b."]
