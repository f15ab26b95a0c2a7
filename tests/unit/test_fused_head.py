"""The chunked head: equal to autograd through whole logits for any loss and any chunk, and no product more than needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.batch.loss import Loss, Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.registry import KernelSet
from dovetail.nn.heads import VocabShard, fused_loss, fused_token_stats
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from tests.helpers.tolerances import (
    OP_BF16,
    SUM_ORDER,
    assert_close,
    assert_sum_close,
    tensor_error,
)

WIDTH, VOCAB = 6, 17
LENGTHS = (5, 1, 9, 3)
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul")


class Tokenwise:
    """A sum over tokens of a function of both statistics, with a metric."""

    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        weight = batch.fields["weight"]
        total = (weight * stats.logprob.exp() - 0.3 * stats.entropy.square()).sum()
        return Loss(
            total, batch.mask.sum(), {"entropy": Sum(stats.entropy.sum(), batch.mask.sum())}
        )


def sequencewise(stats: TokenStats, batch: PackedBatch) -> Loss:
    """A ratio of whole sequences (GSPO): e^(mean over a sequence's tokens), clipped from above, times its advantage."""
    ids, n = batch.sequence_ids, batch.num_sequences
    counts = torch.bincount(ids, minlength=n).clamp(min=1)
    zeros = stats.logprob.new_zeros(n)
    ratio = (zeros.index_add(0, ids, stats.logprob - batch.fields["old"]) / counts).exp()
    entropy = zeros.index_add(0, ids, stats.entropy) / counts
    advantage = zeros.index_add(0, ids, batch.fields["weight"]) / counts
    total = (torch.minimum(ratio, ratio.new_tensor(1.5)) * advantage + 0.1 * entropy.square()).sum()
    return Loss(total, torch.tensor(n))


def only_logprob(stats: TokenStats, batch: PackedBatch) -> Loss:
    return Loss(-stats.logprob.sum(), batch.mask.sum())


def made(head_chunk: int, *, temperature: bool = True) -> tuple[Tensor, VocabShard, PackedBatch]:
    """Hidden states, the whole head as one shard, and the counted tokens of a batch, in float64."""
    draw = torch.Generator().manual_seed(0)
    batch = PackedBatch.pack(
        [torch.randint(VOCAB, (n,), generator=draw) for n in LENGTHS], dtype=torch.float64
    )
    count = len(batch)
    fields = {
        name: torch.randn(count, generator=draw, dtype=torch.float64) for name in ("weight", "old")
    }
    if temperature:
        fields["temperature"] = torch.linspace(0.5, 2.0, count, dtype=torch.float64)
    counted = batch.with_fields(**fields)
    counted = counted.compact(counted.mask.nonzero()[:, 0])
    x = torch.randn(len(counted), WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    return x, VocabShard(weight, 0, Axis("tp"), Products(KernelSet(head_chunk=head_chunk))), counted


def whole(x: Tensor, shard: VocabShard, batch: PackedBatch, loss: Callable[..., Loss]) -> Loss:
    """The same loss from logits that exist, by autograd alone."""
    return loss(whole_stats(x, shard, batch), batch)


def whole_stats(x: Tensor, shard: VocabShard, batch: PackedBatch) -> TokenStats:
    temperature = batch.fields.get("temperature", torch.ones(len(batch)))
    logprobs = (x @ shard.weight.T / temperature[:, None]).log_softmax(-1)
    return TokenStats(
        logprobs.gather(1, batch.targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    )


def sizes(loss: Any, x: Tensor, shard: VocabShard, batch: PackedBatch) -> list[Tensor]:
    """The loss of each token alone, whose sum it is, or of the whole batch where sequences matter."""
    stats = whole_stats(x, shard, batch)
    if loss is sequencewise:
        return [loss(stats, batch).total]
    tokens = [torch.tensor([i]) for i in range(len(batch))]
    alone = [(TokenStats(stats.logprob[i], stats.entropy[i]), batch.compact(i)) for i in tokens]
    return [loss(*each).total for each in alone]


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
@pytest.mark.parametrize(
    "loss", [Tokenwise(), sequencewise, only_logprob], ids=["tokens", "sequences", "logprob"]
)
@pytest.mark.parametrize("temperature", [True, False], ids=["temperature", "plain"])
def test_equals_autograd_through_whole_logits(chunk: int, loss: Any, temperature: bool) -> None:
    """Sequences of the middle lie over several chunks; an upstream factor reaches both gradients."""
    x, shard, batch = made(chunk, temperature=temperature)
    expected = whole(x, shard, batch, loss)
    want = torch.autograd.grad(3.0 * expected.total, (x, shard.weight))
    found = fused_loss(x, shard, batch, loss)
    assert_sum_close(found.total, expected.total, sizes(loss, x, shard, batch), SUM_ORDER)
    assert int(found.count) == int(expected.count)
    for name, (total, count) in expected.metrics.items():
        assert_close(found.metrics[name].total, total, SUM_ORDER)
        assert int(found.metrics[name].count) == int(count)
        assert not found.metrics[name].total.requires_grad
    for a, b in zip(torch.autograd.grad(3.0 * found.total, (x, shard.weight)), want, strict=True):
        assert_close(a, b, SUM_ORDER)


def test_a_sequence_loss_that_lies_about_being_separable_is_wrong() -> None:
    """The mutation: handed chunks, a ratio of whole sequences becomes something else; so the comparison can fail."""

    class Liar:
        separable = True

        def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
            return sequencewise(stats, batch)

    x, shard, batch = made(3)
    assert (
        tensor_error(
            fused_loss(x, shard, batch, Liar()).total, whole(x, shard, batch, sequencewise).total
        )
        > SUM_ORDER
    )


@pytest.mark.parametrize("loss", [Tokenwise(), sequencewise], ids=["tokens", "sequences"])
def test_an_empty_batch_has_a_total_of_zero_and_gradients(loss: Any) -> None:
    x, shard, batch = made(3)
    x, batch = x[:0].detach().requires_grad_(), batch.compact(torch.empty(0, dtype=torch.int64))
    found = fused_loss(x, shard, batch, loss)
    dx, dw = torch.autograd.grad(found.total, (x, shard.weight))
    assert found.total.item() == 0.0
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(shard.weight))
    assert fused_token_stats(x, shard, batch).logprob.shape == (0,)


def test_scoring_equals_whole_logits_and_keeps_no_graph() -> None:
    x, shard, batch = made(4)
    found = fused_token_stats(x, shard, batch)
    for a, b in zip(found, whole_stats(x, shard, batch), strict=True):
        assert_close(a, b, SUM_ORDER)
        assert not a.requires_grad


class CountedProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(PRODUCTS)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("loss", "forward_only", "a_chunk"),
    [
        (None, True, 1),
        (Tokenwise(), True, 1),
        (sequencewise, True, 1),
        (Tokenwise(), False, 3),
        (sequencewise, False, 4),
    ],
)
def test_products_per_chunk(loss: Any, forward_only: bool, a_chunk: int) -> None:
    """One where nothing asks for a gradient, three for a separable loss, four for another."""
    chunk = 4
    x, shard, batch = made(chunk)
    chunks = -(-len(batch) // chunk)
    with CountedProducts() as seen:
        if loss is None:
            fused_token_stats(x, shard, batch)
        elif forward_only:
            with torch.no_grad():
                fused_loss(x, shard, batch, loss)
        else:
            fused_loss(x, shard, batch, loss).total.backward()
    assert seen.count == a_chunk * chunks


def test_half_precision_weights_sum_their_gradient_in_float32() -> None:
    """600 equal rows, one a chunk: a sum kept in bfloat16 would stop growing after 256 of them. The loss sees float32."""
    n = 600
    batch = PackedBatch.pack([torch.zeros(n + 1, dtype=torch.int64)])
    batch = batch.with_fields(weight=torch.ones(n + 1)).compact(torch.arange(n))
    x = torch.full((n, WIDTH), 0.5, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    seen: set[torch.dtype] = set()

    def loss(stats: TokenStats, batch: PackedBatch) -> Loss:
        seen.update([stats.logprob.dtype, stats.entropy.dtype, batch.fields["weight"].dtype])
        return only_logprob(stats, batch)

    fused_loss(
        x, VocabShard(weight, 0, Axis("tp"), Products(KernelSet(head_chunk=1))), batch, loss
    ).total.backward()
    assert seen == {torch.float32}
    assert weight.grad is not None
    assert_close(
        weight.grad[0].to(torch.float32), torch.full((WIDTH,), -n * 0.5 * (1 - 1 / VOCAB)), OP_BF16
    )


class Named(Tokenwise):
    """Tokenwise, with a metric for each target that there is."""

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        ones = torch.ones_like(stats.logprob)
        metrics = {
            str(y): Sum(stats.logprob[batch.targets == y].sum(), ones.sum())
            for y in batch.targets.tolist()
        }
        return super().__call__(stats, batch)._replace(metrics=metrics)


def test_chunks_may_have_different_metrics() -> None:
    x, shard, batch = made(head_chunk=1)
    found = fused_loss(x, shard, batch, Named())
    whole = fused_loss(*made(head_chunk=99), Named())
    assert found.metrics.keys() == whole.metrics.keys()
    for name, expected in whole.metrics.items():
        assert_close(found.metrics[name].total, expected.total, SUM_ORDER)
