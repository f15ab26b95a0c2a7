"""Weight gradients added where they lie: those of autograd, in the dtype in which they are reduced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.registry import KernelSet
from dovetail.nn.heads import VocabShard, fused_loss
from dovetail.nn.layers import (
    ColumnLinear,
    GradAccumulator,
    Linear,
    ReplicatedLinear,
    RowLinear,
    VocabEmbedding,
    WgradQueue,
)
from dovetail.nn.products import Products
from dovetail.nn.tiling import Tiled
from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh
from tests.helpers.tiled import make, tokens
from tests.helpers.tolerances import OP_BF16, OP_FP32, SUM_ORDER, assert_close, tensor_error

MICROS = 3
KINDS: dict[str, Callable[[Mesh], Linear]] = {
    "column": lambda mesh: ColumnLinear(
        8, {"q": (2, 3), "k": (1, 3)}, mesh, KernelSet(), bias=True
    ),
    "row": lambda mesh: RowLinear(8, 9, mesh, KernelSet(), bias=True),
    "token": lambda _: ReplicatedLinear(8, 9, KernelSet(), bias=True),
    "without bias": lambda mesh: RowLinear(8, 9, mesh, KernelSet()),
}


def layer(kind: str, dtype: torch.dtype = torch.float64) -> Linear:
    made, draw = KINDS[kind](Mesh.solo()).to(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def micros(dtype: torch.dtype = torch.float64, number: int = MICROS) -> list[tuple[Tensor, Tensor]]:
    """An input and a gradient of the output for each micro-batch, of different lengths."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(5 + i, 8, generator=draw).to(dtype),
            torch.randn(5 + i, 9, generator=draw).to(dtype),
        )
        for i in range(number)
    ]


def played(
    made: Linear, run: Callable[[nn.Module, Tensor], Any], *, x_learns: bool = True
) -> dict[str, Tensor]:
    """All gradients after forward passes of all micro-batches and then their backward passes, latest first."""
    alive = []
    for x, dy in micros(made.weight.dtype):
        x.requires_grad_(x_learns)
        y = run(made, x)
        alive.append((x, y if isinstance(y, Tensor) else torch.cat(y, dim=-1), dy))
    for _, y, dy in reversed(alive):
        y.backward(dy)
    found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return found | {f"x{i}": x.grad for i, (x, _, _) in enumerate(alive) if x.grad is not None}


def plainly(made: nn.Module, x: Tensor) -> Any:
    return made(x)


def again(made: nn.Module, x: Tensor) -> Any:
    return checkpoint(made, x, use_reentrant=False)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_close(actual[name], expected[name], SUM_ORDER, name)


@pytest.mark.parametrize("run", [plainly, again], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_autograd(kind: str, run: Callable[[nn.Module, Tensor], Any]) -> None:
    expected, adding = played(layer(kind), plainly), layer(kind)
    adding.wgrad_queue = WgradQueue()
    assert_same(played(adding, run), expected)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]], ids=" and ".join)
def test_what_is_frozen_gets_none(frozen: list[str]) -> None:
    expected, adding = layer("row"), layer("row")
    adding.wgrad_queue = WgradQueue()
    for made in (expected, adding):
        for name in frozen:
            made.get_parameter(name).requires_grad_(False)
    found = played(adding, plainly)
    assert_same(found, played(expected, plainly))
    assert not set(frozen) & set(found)


def test_an_input_that_does_not_learn_gets_none() -> None:
    expected, adding = layer("row"), layer("row")
    adding.wgrad_queue = WgradQueue()
    found = played(adding, plainly, x_learns=False)
    assert_same(found, played(expected, plainly, x_learns=False))
    assert found.keys() == {"weight", "bias"}


@pytest.mark.parametrize("frozen", [False, True])
def test_deferred_ones_come_later_in_their_order(frozen: bool) -> None:
    expected, deferring, queue = layer("row"), layer("row"), WgradQueue()
    deferring.wgrad_queue = queue
    for made in (expected, deferring):
        made.weight.requires_grad_(not frozen)
    wanted = played(expected, plainly)
    queue.bucket = "later"
    found = played(deferring, plainly)
    assert "weight" not in found
    works: Any = queue.deferred.get("later", ())
    assert [len(work.args[1]) for work in works] == ([] if frozen else [7, 6, 5])
    queue.flush("earlier")
    assert deferring.weight.grad is None, "another bucket"
    queue.flush("later")
    assert not queue.deferred
    if deferring.weight.grad is not None:
        found["weight"] = deferring.weight.grad
    assert_same(found, wanted)
    deferring.zero_grad()
    with queue.immediate():
        assert_same(played(deferring, plainly), wanted)
    assert queue.bucket == "later" and not queue.deferred


def test_a_queue_that_is_cleared_computes_at_once() -> None:
    made, queue = layer("row"), WgradQueue()
    made.wgrad_queue, queue.bucket = queue, 0
    played(made, plainly)
    queue.clear()
    queue.flush(0)
    assert made.weight.grad is None
    assert "weight" in played(made, plainly)


def test_nothing_is_kept_where_nothing_learns() -> None:
    made = layer("row")
    made.wgrad_queue = WgradQueue()
    with torch.no_grad():
        assert not made(micros()[0][0]).requires_grad


def test_half_precision_weights_sum_in_float32() -> None:
    """A sum in bfloat16 loses what is smaller than its last place; one of 100 equal parts shows it."""
    made = layer("without bias", torch.bfloat16)
    x, dy = micros(torch.bfloat16)[0]
    exact = 100 * (dy.to(torch.float64).T @ x.to(torch.float64))
    errors: list[float] = []
    for queue in (None, WgradQueue()):
        made.wgrad_queue, made.weight.grad = queue, None
        if queue:
            made.weight.grad_dtype = torch.float32
        for _ in range(100):
            made(x).backward(dy)
        assert made.weight.grad is not None
        assert made.weight.grad.dtype == (torch.float32 if queue else torch.bfloat16)
        errors.append(tensor_error(made.weight.grad, exact))
    assert errors[1] <= OP_BF16 < errors[0]


def head(table: VocabEmbedding, rows: int) -> tuple[Tensor, VocabShard, PackedBatch]:
    """Hidden states, a head that has the first rows of a table, and what it is to predict, some tokens at a time."""
    batch = PackedBatch.pack([[3, 1, 4, 0, 2], [2, 2, 0]], dtype=torch.float64)
    counted = batch.compact(batch.mask.nonzero()[:, 0])
    x = torch.randn(
        len(counted), 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).requires_grad_()
    return (
        x,
        VocabShard(table.weight[:rows], 0, Axis("tp"), Products(KernelSet(head_chunk=4)), table),
        counted,
    )


def surprise(stats: TokenStats, batch: PackedBatch) -> Loss:
    return Loss(-stats.logprob.sum(), batch.mask.sum())


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_s_and_a_head_s_are_added_too(tied: bool) -> None:
    """Both uses of a tied table, of which the head knows the first rows only; the head adds during its forward pass."""
    table = VocabEmbedding(7, 4, Mesh.solo()).to(torch.float64)
    table.wgrad_queue, ids, dy = WgradQueue(), torch.tensor([3, 1, 3]), micros()[0][0][:3, :4]
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(2))
    want = torch.zeros_like(table.weight)
    x, shard, batch = head(table, 5)
    logprobs = (x @ table.weight[:5].T).log_softmax(-1)
    from_x, by_head = torch.autograd.grad(
        -logprobs.gather(1, batch.targets[:, None]).sum(), (x, table.weight)
    )
    for turn in range(3):
        x, shard, batch = head(table, 5)
        found = fused_loss(x, shard, batch, surprise)
        if tied:
            table(ids).backward(dy)
            want.index_add_(0, ids, dy)
        found.total.backward()
        want += by_head
        assert x.grad is not None and table.weight.grad is not None
        assert_close(x.grad, from_x, SUM_ORDER, f"turn {turn}")
        assert_close(table.weight.grad, want, SUM_ORDER, f"turn {turn}")


def test_sums_of_a_bfloat16_table_and_head_are_float32() -> None:
    """And rounded nowhere else: what both gave once, three times over."""
    table = VocabEmbedding(7, 4, Mesh.solo()).to(torch.bfloat16)
    table.weight.grad_dtype, table.wgrad_queue = torch.float32, WgradQueue()
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(2))
    ids, dy = torch.tensor([3, 1, 3]), micros()[0][0][:3, :4].to(torch.bfloat16)
    table(ids).backward(dy)
    assert table.weight.grad is not None and table.weight.grad.dtype == torch.float32
    assert_close(
        table.weight.grad, torch.zeros(7, 4).index_add_(0, ids, dy.to(torch.float32)), OP_FP32
    )
    sums = []
    for _ in range(3):
        x, shard, batch = head(table, 5)
        half = x.detach().to(torch.bfloat16).requires_grad_()
        fused_loss(half, shard, batch, surprise).total.backward()
        sums.append(table.weight.grad.clone())
    by_head = sums[1] - sums[0]
    assert by_head[:5].any() and not by_head[5:].any()
    assert_close(sums[2] - sums[1], by_head, OP_FP32)
    exact, _, _ = head(table, 5)
    wide = table.weight[:5].detach().double().requires_grad_()
    logprobs = (exact.detach().to(torch.bfloat16).double() @ wide.T).log_softmax(-1)
    (want,) = torch.autograd.grad(-logprobs.gather(1, batch.targets[:, None]).sum(), wide)
    assert_close(by_head[:5], want, OP_BF16)


def test_a_frozen_head_leaves_its_weight_alone() -> None:
    table = VocabEmbedding(7, 4, Mesh.solo()).to(torch.float64).requires_grad_(False)
    table.wgrad_queue = WgradQueue()
    nn.init.normal_(table.weight)
    x, shard, batch = head(table, 7)
    (2 * fused_loss(x, shard, batch, surprise).total).backward()
    assert x.grad is not None and table.weight.grad is None
    other, shard, batch = head(table, 7)
    fused_loss(other, replace(shard, owner=None), batch, surprise).total.backward()
    assert other.grad is not None and table.weight.grad is None
    assert_close(x.grad, 2 * other.grad, SUM_ORDER)


def test_what_a_head_has_added_cannot_be_scaled_afterwards() -> None:
    table = VocabEmbedding(7, 4, Mesh.solo()).to(torch.float64)
    table.wgrad_queue = WgradQueue()
    nn.init.normal_(table.weight)
    total = fused_loss(*head(table, 7), surprise).total
    with pytest.raises(AssertionError, match="accumulated already"):
        (2 * total).backward()


@pytest.mark.parametrize("family", ["llama_biases", "apertus"])
def test_tiles_add_theirs(family: str) -> None:
    mlp, expected = make(family), make(family)
    x, up = tokens(13, mlp)
    expected(x).backward(up)
    adders = [part for part in mlp.modules() if isinstance(part, GradAccumulator)]
    assert len(adders) == 2
    for adder in adders:
        adder.wgrad_queue = WgradQueue()
    Tiled(mlp, 4)(x.detach()).backward(up)
    for (name, ours), theirs in zip(mlp.named_parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert_close(ours.grad, theirs.grad, SUM_ORDER, name)


def test_what_only_the_forward_pass_needs_is_freed() -> None:
    """A fused product writes a second output into memory that its closure holds."""
    made = layer("without bias")
    (x, dy), *_ = micros()
    second = torch.empty(3)
    held = ref(second)

    def forward(x: Tensor, weight: Tensor, _: Tensor | None, out: Tensor = second) -> Tensor:
        return x @ weight.T + 0 * len(out)

    y = made.fused_product(x.requires_grad_(), None, forward, made.products)
    del second, forward
    assert held() is None
    y.backward(dy)
