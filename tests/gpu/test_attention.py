"""Every packed attention of a CUDA device against float64, what backward does not run again, and what waits on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dovetail.batch.packed import cumulative
from dovetail.kernels import cuda, cudnn, fa4, reference
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import kernels_for
from dovetail.nn.activation_checkpoint import Recompute
from tests.helpers.blocks import Blocks, Runs
from tests.helpers.tolerances import OP_BF16, assert_close, max_abs, worst_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES: tuple[str, ...] = ("torch", "cudnn", "fa4")
PACKS = {
    "ragged": ((5, 300, 64, 1), (5, 300, 64, 1)),
    "one": ((1024,), (1024,)),
    "a dense batch": ((1024, 1024), (1024, 1024)),
    "fewer queries than keys": ((100, 7, 128), (400, 300, 128)),
    "a sequence without queries": ((0, 130, 0), (70, 200, 3)),
    "many": ((17,) * 150, (17,) * 150),
}
HEADS = ((4, 4), (7, 1))
DIMS = ((64, 64), (128, 128), (192, 128), (80, 80))
Three = tuple[Tensor, Tensor, Tensor]


def attention(name: str) -> Callable[..., Tensor]:
    if name == "fa4" and not cuda.package_usable(fa4.INTERFACE, torch.device("cuda")):
        pytest.skip("needs flash-attn-4 and a GPU that it has kernels for")
    return {"fa4": fa4.attention, "cudnn": cudnn.attention, "torch": cuda.attention}[name]


def spans(lengths: tuple[int, ...]) -> Spans:
    return Spans(cumulative(lengths).cuda(), lengths)


def drawn(
    n: tuple[int, ...], m: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int]
) -> tuple[Three, Tensor]:
    """q, k, v as slices of a larger product, as layers give them, and the gradient of the result."""
    draw = torch.Generator("cuda").manual_seed(0)

    def rows(count: int, units: int, dim: int) -> Tensor:
        x = torch.randn(count, 2 * units * dim, generator=draw, device="cuda").to(torch.bfloat16)
        return x[:, : units * dim].unflatten(1, (units, dim)).requires_grad_()

    three = (
        rows(sum(n), heads[0], dims[0]),
        rows(sum(m), heads[1], dims[0]),
        rows(sum(m), heads[1], dims[1]),
    )
    return three, torch.randn(sum(n), heads[0], dims[1], generator=draw, device="cuda").to(
        torch.bfloat16
    )


@contextmanager
def without_waiting() -> Iterator[None]:
    """Nothing in here waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(
    name: str, pack: str, heads: tuple[int, int], dims: tuple[int, int], window: int | None
) -> None:
    run, (n, m) = attention(name), PACKS[pack]
    (q, k, v), up = drawn(n, m, heads, dims)
    exact = [x.detach().to(torch.float64).requires_grad_() for x in (q, k, v)]
    expected = reference.attention(exact[0], exact[1], exact[2], spans(n), spans(m), window)
    wanted = torch.autograd.grad(expected, exact, up.to(torch.float64))
    torch.empty(1 << 26, device="cuda").fill_(float("nan"))  # what memory holds that nobody wrote
    with Runs() as runs:
        found = run(q, k, v, spans(n), spans(m), window)
        grads = torch.autograd.grad(found, (q, k, v), up)
    assert_close(found, expected, OP_BF16)
    largest = max(map(max_abs, wanted))
    for got, true, what in zip(grads, wanted, "qkv", strict=True):
        if max_abs(true):
            assert_close(got, true, OP_BF16, f"d{what}")
        else:  # a query that sees one key has no say; what is left of its gradient is rounding
            assert max_abs(got) <= OP_BF16 * largest, f"d{what}"
    torch.cuda.synchronize()
    dense = pack in ("one", "a dense batch") and (window is None or window >= n[0])
    ours = {
        "torch": True,
        "cudnn": dense and dims in ((64, 64), (128, 128), (80, 80)),
        "fa4": dims in fa4.HEAD_DIMS and (dims[0] == dims[1] or heads[0] == heads[1]),
    }[name]
    word = {"torch": "varlen", "cudnn": "cudnn", "fa4": "fa4"}[name]
    assert any(word in op for op in runs.seen) == ours, f"{name} ran {sorted(runs.seen)}"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name: str, pack: str, heads: tuple[int, int]) -> None:
    check(name, pack, heads, (128, 128), None)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_head_dims(name: str, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    for pack in ("ragged", "one"):
        check(name, pack, heads, dims, None)


@pytest.mark.parametrize("window", [1, 100, 1000])
@pytest.mark.parametrize("pack", ["ragged", "one", "fewer queries than keys"])
@pytest.mark.parametrize("name", NAMES)
def test_windows(name: str, pack: str, window: int) -> None:
    check(name, pack, (8, 2), (64, 64), window)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_where_torch_is_told_to_be(name: str) -> None:
    run, lengths = attention(name), (1024, 1024)
    (q, k, v), up = drawn(lengths, lengths, (8, 2), (128, 128))
    where = spans(lengths)
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(run(q, k, v, where, where), (q, k, v), up) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("pack", ["ragged", "a dense batch", "fewer queries than keys"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name: str, pack: str) -> None:
    run, (n, m) = attention(name), PACKS[pack]
    (q, k, v), up = drawn(n, m, (8, 2), (128, 128))
    where = spans(n), spans(m)
    torch.autograd.grad(run(q, k, v, *where), (q, k, v), up)  # compiles and plans
    with without_waiting():
        torch.autograd.grad(run(q, k, v, *where), (q, k, v), up)


def blocks(name: str, lengths: tuple[int, ...], depth: int = 3) -> Blocks:
    kernels = replace(kernels_for(torch.device("cuda")), attention=attention(name))
    return Blocks(kernels, torch.bfloat16, lengths, depth, torch.device("cuda"))


@pytest.mark.parametrize("recompute", ["light", "selective", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_runs_once_and_what_is_kept_comes_back(name: str, recompute: Recompute) -> None:
    """Sums in float32 come in any order in backward passes, here and on the way through three layers."""
    some = blocks(name, (1024, 1024))
    expected, once = some.gradients(some.trunk("none"), 2)
    assert once["forward"] == once["backward"] == some.depth
    for offload in (False, True):
        found, runs = some.gradients(some.trunk(recompute, offload=offload), 2, repeats=2)
        assert worst_error(found, expected)[0] <= 2 * OP_BF16, worst_error(found, expected)
        assert runs["forward"] == (2 if recompute == "full" else 1) * some.depth
        assert runs["backward"] == some.depth


def test_what_is_kept_leaves_the_device() -> None:
    """Of a pass over many blocks, the device keeps the last one's share, and nothing waits for the copies."""
    some, left = blocks("torch", (4096, 4096), depth=16), {}
    x = torch.randn(8192, some.spec.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    for offload in (False, True):
        model, context = some.trunk("selective", offload=offload), some.context
        for again in (False, True):  # pinned memory and gradients are there from the first one on
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with without_waiting() if again else nullcontext():
                (out,) = model.blocks(range(some.depth), (x,), (context,))
                left[offload] = torch.cuda.memory_allocated() - before
                out.backward(out.detach())
            del out
    assert left[True] < 0.25 * left[False], left
