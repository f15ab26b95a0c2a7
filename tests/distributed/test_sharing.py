"""Attention cut over cp against all tokens on one rank: values and every gradient, for documents of any length, and bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dovetail.batch.micro import ContextShard
from dovetail.batch.packed import PackedBatch
from dovetail.kernels import reference
from dovetail.kernels.reference import sum_deterministic
from dovetail.kernels.registry import KernelSet
from dovetail.nn.attention import PackedAttention
from dovetail.nn.context_parallel import SharedAttention, cut_chunks, share_keys
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import gather_in_order, gather_mirrored
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from tests.helpers.harness import run
from tests.helpers.nccl_rules import kept
from tests.helpers.poisoned import poisoned
from tests.helpers.tolerances import SUM_ORDER, assert_close

HEADS, GROUPS, CHANNELS = 4, 2, 8
TOKENS = 48  # divides by twice any number of ranks here
LENGTHS = ((48,), (5, 8, 3, 20, 12), (1,) * 7 + (40, 1), (25, 23), (12,) * 4)
WINDOWS = (None, 2, 7)
CPU = torch.device("cpu")


def spans(lengths: tuple[int, ...]) -> reference.Spans:
    batch = PackedBatch.pack([[0] * n for n in lengths])
    return reference.Spans(batch.cu_seqlens, batch.lengths)


def drawn(dtype: torch.dtype, values: int = CHANNELS) -> list[Tensor]:
    """Queries, keys and values of all tokens, and a gradient of what attention makes of them."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, values), (HEADS, values))
    return [
        torch.randn(TOKENS, *shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def cases() -> Iterator[tuple[tuple[int, ...], int | None, int]]:
    for lengths in LENGTHS:
        for window in WINDOWS:
            yield lengths, window, CHANNELS
    yield LENGTHS[1], None, CHANNELS // 2


def compare(layout: Layout, ulysses: int) -> None:
    """This rank's tokens of every case, and the gradients that it ends up with, on memory that holds NaN."""
    mesh = Mesh.build(layout)
    share = ContextShard(mesh["cp"].rank, mesh["cp"].size, ulysses)
    mine = share.order(TOKENS)
    for lengths, window, values in cases():
        q, k, v, up = drawn(torch.float64, values)
        whole = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        expected = PackedAttention(spans(lengths), KernelSet()).attend(*whole, window)
        wanted = torch.autograd.grad(expected, whole, up)
        own = (
            q.detach()[mine].requires_grad_(),
            k.detach()[mine].requires_grad_(),
            v.detach()[mine].requires_grad_(),
        )
        shared = SharedAttention(
            cut_chunks(lengths, share, CPU), mesh.context[ulysses], KernelSet()
        )
        with poisoned(), kept():
            actual = shared.attend(*own, window)
            found = torch.autograd.grad(actual, own, up[mine])
        what = f"{layout}, {lengths}, window {window}"
        assert_close(actual, expected[mine], SUM_ORDER, what)
        for name, a, b in zip("qkv", found, wanted, strict=True):
            assert_close(a, b[mine], SUM_ORDER, f"{what}: d{name}")


@pytest.mark.parametrize(
    ("world", "mode", "ulysses"),
    [
        *((2, "ulysses", 2), (3, "gather", 1), (4, "product", 2)),
        *(pytest.param(world, "gather", 1, marks=pytest.mark.soak) for world in (2, 4)),
    ],
)
def test_equals_attention_of_all_tokens(world: int, mode: str, ulysses: int) -> None:
    run(world, compare, Layout(cp=world, cp_mode=mode), ulysses)


def plainly(
    k: Tensor, v: Tensor, stretches: list[slice], axis: Axis
) -> list[tuple[Tensor, Tensor]]:
    """`share_keys` of one collective and torch's own slices, each with its own gradient."""
    chunks = gather_in_order(torch.cat((k, v), dim=1), axis, sum_deterministic).chunk(2 * axis.size)
    kv = torch.cat((*chunks[0::2], *reversed(chunks[1::2])))
    return [kv[stretch].chunk(2, dim=1) for stretch in stretches]  # type: ignore[misc]  # always two


def bits(dtype: torch.dtype) -> None:
    mesh = Mesh.build(Layout(cp=4, cp_mode="gather"))
    share, axis = ContextShard(mesh["cp"].rank, 4, 1), mesh.context[1].gather
    mine = share.order(TOKENS)
    for lengths in LENGTHS:
        stretches = [chunk.keys for chunk in cut_chunks(lengths, share, CPU)]
        q, k, v, _ = drawn(dtype)
        own = k[mine].requires_grad_(), v[mine].requires_grad_()
        draw = torch.Generator().manual_seed(share.rank)
        made = [
            list(share_keys(*own, stretches, axis, sum_deterministic)),
            plainly(*own, stretches, axis),
        ]
        up = [torch.randn(x.shape, generator=draw).to(dtype) for pair in made[0] for x in pair]
        grads = []
        for pairs in made:
            flat = [x for pair in pairs for x in pair]
            for x, stretch in zip(flat, [s for s in stretches for _ in range(2)], strict=True):
                assert len(x) == stretch.stop - stretch.start
            grads.append([*flat, *torch.autograd.grad(flat, own, up)])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), (dtype, lengths)
        assert torch.equal(made[0][0][0], k[stretches[0]]) and torch.equal(
            made[0][1][1], v[stretches[1]]
        )
        with kept() as rules:
            assert torch.equal(gather_mirrored(q[mine], axis), q)
        assert sum(rules.seen.values()) == 2


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.soak)]
)
def test_bits_are_those_of_one_gather_and_plain_slices(dtype: torch.dtype) -> None:
    run(4, bits, dtype)
