"""Collectives by copy engines: of any size, several under way, against the same by formula and NCCL; and FSDP2's."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce_scatter_copy_in

from dovetail.engine.copying import PeerScatter, copies_of, together
from dovetail.factory.engine import make_mesh
from dovetail.parallel.layout import Layout
from tests.harness import run
from tests.peer_collectives import any_order
from tests.tolerances import OP_BF16, OP_FP32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA devices")]

ROUNDS = 150
ROWS = 40000  # of WIDTH numbers: slots grow several times


def each_gives_what_it_should(ranks: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    axis, late = make_mesh(Layout(tp=ranks), device)["tp"], random.Random(dist.get_rank())
    for dtype, bound in ((torch.float32, OP_FP32), (torch.bfloat16, OP_BF16)):
        before = axis.peers.begun if axis.peers is not None else 0

        def delay() -> None:
            torch.cuda._sleep(late.choice((0, 0, 200_000, 2_000_000)))  # cycles, in the computation

        assert any_order(axis, device, ROUNDS, ROWS, dtype, bound, delay) == before + ROUNDS


def as_nccl(ranks: int) -> None:
    """What FSDP2 asks for, in pieces of which the last one is smaller, and too little for this."""
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = make_mesh(Layout(dp=ranks), device)
    copies, axis = copies_of(mesh, "fsdp"), mesh["fsdp"]
    assert copies is not None
    assert copies_of(make_mesh(Layout(dp=ranks, copy_engines=False), device), "fsdp") is None
    longest = copies.gather.peers.memory.ring.slot_bytes // 2
    for numbers in (copies.scatter.peers.memory.ring.slot_bytes // 4 * 3 // ranks + 64, longest + longest // 4, 100):
        shard = torch.randn(numbers, device=device).to(torch.bfloat16)
        whole, expected = (
            torch.full((ranks * numbers,), float("nan"), device=device).to(torch.bfloat16) for _ in range(2)
        )
        whole.chunk(ranks)[axis.rank].copy_(shard)  # FSDP2 gathers in place
        copies.gather(whole, whole.chunk(ranks)[axis.rank], axis.group)
        dist.all_gather_into_tensor(expected, shard, group=axis.group)
        assert torch.equal(whole, expected)
        parts = torch.randn(ranks * numbers, device=device)
        total, expected = torch.full_like(parts[:numbers], float("nan")), torch.empty_like(parts[:numbers])
        copies.scatter(total, parts, axis.group, dist.ReduceOp.SUM)
        dist.reduce_scatter_tensor(expected, parts, group=axis.group)
        assert bool(((total - expected).abs() <= OP_FP32 * expected.abs().clamp(min=1.0)).all())
    before = copies.scatter.peers.begun
    for shapes in (
        ((5000, 600), (333, 77), (1, 5)),
        ((9999, 800),),
    ):  # of a group's gradients, not all with rows for every rank
        gradients = [torch.randn(shape, device=device) for shape in shapes]
        scatter = PeerScatter(copies.scatter.peers)
        laid = laid_down(scatter, gradients, ranks)
        plain = together(laid, ranks)
        total = scatter.allocate((len(plain) // ranks,), dtype=torch.float32, device=device).fill_(float("nan"))
        scatter(total, laid, axis.group, dist.ReduceOp.SUM)
        dist.reduce_scatter_tensor(expected := torch.empty_like(total), plain, group=axis.group)
        close = (total - expected).abs() <= OP_FP32 * expected.abs().clamp(min=1.0)
        assert bool((close | (plain.chunk(ranks)[axis.rank] == 0)).all())  # 0: where no gradient lies
    assert copies.gather.peers.begun and copies.scatter.peers.begun > before > 0


def laid_down(scatter: PeerScatter, gradients: list[Tensor], ranks: int) -> Tensor:
    """As FSDP2 does it."""
    rows = sum(-(-len(x) // ranks) * x[0].numel() for x in gradients)
    laid = scatter.allocate((ranks * rows,), dtype=torch.float32, device=gradients[0].device)
    foreach_reduce_scatter_copy_in(list(gradients), laid, ranks)
    return laid


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_gives_what_it_should(ranks: int) -> None:
    needs(ranks)
    run(ranks, each_gives_what_it_should, ranks, device="cuda")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fsdp_gets_what_nccl_would_give(ranks: int) -> None:
    needs(ranks)
    run(ranks, as_nccl, ranks, device="cuda")


def needs(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
