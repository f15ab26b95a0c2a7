"""What a block's backward pass computes again: attention never, unless asked; and where waits what it keeps instead."""

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from dovetail.kernels import fa4
from dovetail.kernels.registry import KernelSet
from dovetail.memory import PinnedArena
from dovetail.nn.activation_checkpoint import (
    ActivationOffload,
    OffloadedTensor,
    PinnedPool,
    Recompute,
    is_attention,
    runner,
)
from tests.helpers.blocks import Blocks
from tests.helpers.fa4_stand_in import installed
from tests.helpers.tolerances import EXACT, worst_error

RECOMPUTES: tuple[Recompute, ...] = ("light", "selective", "full")


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_what_runs_again(recompute: Recompute) -> None:
    """Attention once a layer and span of equal lengths, unless everything is computed again. The light level repeats no
    product."""
    blocks = Blocks()
    expected, once = blocks.gradients(blocks.trunk("none"))
    found, runs = blocks.gradients(blocks.trunk(recompute))
    assert worst_error(found, expected)[0] == EXACT
    assert once["forward"] == once["backward"] == blocks.depth * len(blocks.lengths)
    assert runs["backward"] == once["backward"]
    assert runs["forward"] == (2 if recompute == "full" else 1) * once["forward"]
    again = 0 if recompute == "light" else 4 * blocks.depth  # qkv, o, gate_up and down
    assert runs["product"] == once["product"] + again


@pytest.mark.parametrize(
    "recompute", [pytest.param("light", marks=pytest.mark.soak), "selective", "full"]
)
@pytest.mark.parametrize("micros", [1, 3])
def test_offload_changes_no_gradient(recompute: Recompute, micros: int) -> None:
    blocks = Blocks()
    expected, _ = blocks.gradients(blocks.trunk("none"), micros)
    _, here = blocks.gradients(blocks.trunk(recompute), micros)
    model = blocks.trunk(recompute, offload=True)
    found, there = blocks.gradients(model, micros, repeats=2)
    assert worst_error(found, expected)[0] == EXACT
    assert there == here
    assert model.host is not None and len(model.host.free) == micros, (
        "an arena a live micro-batch, used again"
    )


def test_gradients_are_made_of_what_comes_back() -> None:
    """The mutation: what waits on the host is changed there, and every gradient but the last block's own notices."""
    blocks = Blocks()
    expected, _ = blocks.gradients(blocks.trunk("full"))
    model, arena = blocks.trunk("full", offload=True), PinnedArena()
    assert model.host is not None
    model.host.free.append(arena)  # the one that the next pass takes
    out = model(blocks.tokens(1)[0], blocks.context)
    arena.reset()
    arena.allocate(blocks.dtype, (sum(blocks.lengths), blocks.spec.width)).mul_(
        1.5
    )  # the first block's input
    out.backward(out.detach())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]) == (
            "layers.0." not in name and "embed" not in name
        ), name


class Small(PinnedPool):
    """Of a host that has so many bytes for arenas altogether."""

    def __init__(self, num_bytes: int | None, ranks: int = 1) -> None:
        super().__init__(torch.device("cpu"), available=self.left, ranks=ranks)
        self.most, self.made = num_bytes, list[PinnedArena]()
        self.asked = 0

    def left(self) -> int | None:
        self.asked += 1
        return None if self.most is None else self.most - self.num_bytes

    def arena(self) -> PinnedArena:
        found = super().arena()
        self.made += [found] if all(found is not one for one in self.made) else []
        return found

    @property
    def num_bytes(self) -> int:
        return sum(arena.num_bytes for arena in self.made)


@pytest.mark.parametrize(
    "recompute",
    ["selective", *(pytest.param(n, marks=pytest.mark.soak) for n in ("light", "full"))],
)
@pytest.mark.parametrize("micros", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_what_the_host_has_no_room_for_stays(recompute: Recompute, micros: int) -> None:
    """Nothing, half and all of it leaves; no gradient and no number of runs changes, in the first pass and in later ones."""
    blocks = Blocks(depth=5)
    expected, _ = blocks.gradients(blocks.trunk("none"), micros)
    _, here = blocks.gradients(blocks.trunk(recompute), micros)
    model, whole = blocks.trunk(recompute), 0
    for share in (None, 0.0, 0.5, 1.0):
        host = model.host = Small(None if share is None else int(share * whole))
        for _ in range(2):
            before = host.not_offloaded
            found, there = blocks.gradients(model, micros)
            assert worst_error(found, expected)[0] == EXACT
            assert there == here
            assert len(host.free) == len(host.made) == micros, (
                "every arena came back, an empty one too"
            )
            stayed = host.not_offloaded - before
            if host.most is None:
                whole = host.num_bytes
                assert stayed == 0 < whole
            else:
                assert host.num_bytes <= host.most
                assert whole - host.most <= stayed <= whole - host.num_bytes, (
                    "what does not leave is counted"
                )
                assert (share == 0.5) == (0 < host.num_bytes < whole)


def test_the_first_blocks_leave_and_the_others_come_back_ahead() -> None:
    """Each comes back when the block behind it is asked for, whether that one left or stayed."""
    x = torch.randn(16, 8)
    host = Small(2 * x.nbytes)
    offload, kept = ActivationOffload(host, "full"), list[OffloadedTensor]()

    def block() -> Tensor:
        one = offload.put(x + len(kept))
        assert isinstance(one, OffloadedTensor)
        kept.append(one)
        return x

    for _ in range(4):
        offload(block)
    assert [one.host is None for one in kept] == [False, False, True, True]
    assert [one.device_tensor is None for one in kept] == [True, True, False, False]
    here = {3: [2], 2: [1], 1: [0], 0: []}
    for number in here:
        assert torch.equal(offload.get(kept[number]), x + number)
        assert [i for i, one in enumerate(kept) if one.device_tensor is not None] == here[number]
    assert host.free == [offload.arena] and host.not_offloaded == 2 * x.nbytes


def test_memory_that_is_there_is_used_without_asking() -> None:
    blocks = Blocks()
    model = blocks.trunk("selective")
    host = model.host = Small(None)
    blocks.gradients(model)
    asked, host.most = host.asked, 0
    assert asked > 0
    blocks.gradients(model)
    assert host.asked == asked and host.not_offloaded == 0


def test_no_rank_takes_the_share_of_another() -> None:
    x, host = torch.zeros(16, dtype=torch.float64), Small(4 * 128, ranks=4)
    arena = host.arena()
    assert host.allocate(arena, x) is not None
    assert host.allocate(arena, x) is None and host.allocate(arena, x[:8]) is not None


def test_what_comes_back_lies_as_before() -> None:
    """Attention over [B, H, n, C] returns heads beside each other; a slice of something larger comes back dense."""
    offload, x = ActivationOffload(PinnedPool(torch.device("cpu")), "full"), torch.randn(2, 3, 4, 5)
    given = (x, x.transpose(1, 2), x[..., :3], torch.tensor([3]))
    kept: list[Tensor | OffloadedTensor] = []

    def block(x: Tensor) -> Tensor:
        kept.extend(offload.put(one) for one in given)
        return x

    for _ in range(2):  # what the first one keeps has left when the second begins
        offload(block, x)
    found = [offload.get(one) for one in kept[: len(given)]]
    assert all(torch.equal(one, before) for one, before in zip(found, given, strict=True))
    assert [one.stride() for one in found] == [
        x.stride(),
        x.transpose(1, 2).stride(),
        (36, 12, 3, 1),
        (1,),
    ]
    assert kept[3] is given[3], "states of generators stay where they are"


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_product_that_a_block_writes_to_is_computed_again(recompute: Recompute) -> None:
    """OLMo clips its products where they lie, and the gradient asks what they were before."""
    x, *weights = (torch.randn(1, 8, 8, requires_grad=True) for _ in range(4))

    def block(x: Tensor) -> Tensor:
        clipped, other = (torch.nn.functional.linear(x, weight[0]) for weight in weights[:2])
        clipped.view(4, 16).clamp_(-0.5, 0.5)
        return (torch.nn.functional.linear(clipped * other, weights[2][0]).sin() @ x[0]).sin()

    def gradients(recompute: Recompute) -> tuple[Tensor, ...]:
        return torch.autograd.grad(runner(recompute)(block, x).sum(), (x, *weights))

    assert all(map(torch.equal, gradients(recompute), gradients("none")))


def test_a_pass_that_is_given_up_harms_no_other() -> None:
    blocks = Blocks()
    expected, _ = blocks.gradients(blocks.trunk("none"))
    model = blocks.trunk("selective", offload=True)
    model(blocks.tokens(1)[0], blocks.context)  # no backward pass
    found, _ = blocks.gradients(model)
    assert worst_error(found, expected)[0] == EXACT


def test_the_operation_of_fa4_is_kept() -> None:
    blocks = Blocks(KernelSet(attention=fa4.attention), torch.bfloat16)
    with installed() as package:
        expected, _ = blocks.gradients(blocks.trunk("none"))
        assert package.calls == {"forward": blocks.depth, "backward": blocks.depth}
        for recompute in RECOMPUTES:
            for offload in (False, True):
                package.calls.clear()
                found, _ = blocks.gradients(blocks.trunk(recompute, offload=offload))
                assert worst_error(found, expected)[0] == EXACT
                runs = 2 if recompute == "full" else 1
                assert package.calls == {"forward": runs * blocks.depth, "backward": blocks.depth}


@pytest.mark.parametrize(
    "operation",
    [
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.dovetail.fa4_attention.default,
    ],
    ids=str,
)
def test_attention_kernels_are_known_by_their_names(operation: object) -> None:
    assert is_attention(str(operation))
