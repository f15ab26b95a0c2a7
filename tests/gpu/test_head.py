"""The head on a CUDA device against float64: row kernels, log-probs, gradients, memory, and no waiting for the host."""

import hashlib
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels import logprob_triton, quack_head, reference
from dovetail.kernels.registry import kernels_for
from dovetail.nn.heads import VocabShard, combine, fused_loss, fused_token_stats
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from tests.helpers.gpu_waits import no_waiting
from tests.helpers.head_memory import Policy
from tests.helpers.tolerances import HEAD_LOGPROB, OP_BF16, OP_FP32, assert_close, max_abs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QWEN_7B = (3584, 152064)  # width and vocabulary
EVEN = (40, 1000)
ODD = (40, 1003)  # a vocabulary whose rows start at no multiple of 16 bytes


class ByToken:
    """A policy gradient with an entropy bonus, a token at a time."""

    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        total = -(stats.logprob.exp() * batch.fields["advantage"] + 0.01 * stats.entropy).sum()
        return Loss(total, batch.mask.sum())


class BySequence(ByToken):
    """The same, for a head that does not know that it could do it at once."""

    separable = False


def made(
    tokens: int, sizes: tuple[int, int], chunk: int, temperature: float | None
) -> tuple[Tensor, VocabShard, PackedBatch]:
    """Hidden states of the counted tokens, the head, and those tokens: every third is masked and gone."""
    width, vocab = sizes
    draw = torch.Generator("cuda").manual_seed(0)
    batch = PackedBatch.pack(
        [torch.randint(vocab, (n,)) for n in (tokens // 3, tokens - tokens // 3)]
    ).to("cuda")
    fields = {"advantage": torch.randn(tokens, device="cuda", generator=draw)}
    if temperature is not None:
        fields["temperature"] = torch.linspace(temperature, 1.5, tokens, device="cuda")
    batch = batch.with_fields(**fields).compact(
        (torch.arange(tokens, device="cuda") % 3 > 0).nonzero()[:, 0]
    )
    x = (
        torch.randn(len(batch), width, device="cuda", generator=draw)
        .to(torch.bfloat16)
        .requires_grad_()
    )
    weight = torch.randn(vocab, width, device="cuda", generator=draw).mul_(
        1.2 * width**-0.5
    )  # logits of deviation 1.2
    kernels = replace(kernels_for(x.device), head_chunk=chunk)
    return (
        x,
        VocabShard(weight.to(torch.bfloat16).requires_grad_(), 0, Axis("tp"), Products(kernels)),
        batch,
    )


def exact(x: Tensor, shard: VocabShard, batch: PackedBatch) -> TokenStats:
    """By autograd, in float64."""
    z = x.to(torch.float64) @ shard.weight.to(torch.float64).T
    if "temperature" in batch.fields:
        z = z / batch.fields["temperature"].to(torch.float64)[:, None]
    every = z.log_softmax(-1)
    return TokenStats(
        every.gather(-1, batch.targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    )


def test_the_row_kernels_are_chosen_and_equal_the_reference() -> None:
    pytest.importorskip("triton")
    from tests.helpers.head_rows import measure

    assert kernels_for(torch.device("cuda")).describe()["vocab_grad_"] == "logprob_triton"
    for case, errors in measure("cuda").items():
        for what, error in errors.items():
            assert error <= (OP_BF16 if "bfloat16" in what else OP_FP32), (case, what, error)


@pytest.mark.parametrize("loss", [ByToken(), BySequence()], ids=["three products", "four products"])
@pytest.mark.parametrize("temperature", [None, 0.4], ids=["plain", "temperature"])
@pytest.mark.parametrize(
    ("sizes", "tokens", "chunk"),
    [(ODD, 200, 64), (EVEN, 200, 64), (QWEN_7B, 384, 100)],
    ids=["odd", "even", "7B"],
)
def test_head_against_float64(
    sizes: tuple[int, int], tokens: int, chunk: int, temperature: float | None, loss: ByToken
) -> None:
    x, shard, batch = made(tokens, sizes, chunk, temperature)
    expected = exact(x, shard, batch)
    want = torch.autograd.grad(loss(expected, batch).total, (x, shard.weight))
    torch.empty(1 << 28, device="cuda").fill_(float("nan"))  # what memory holds that nobody wrote
    scored, limit = fused_token_stats(x, shard, batch), HEAD_LOGPROB / (temperature or 1.0)
    assert max_abs(scored.logprob - expected.logprob) <= limit
    assert max_abs(scored.entropy - expected.entropy) <= limit
    found = fused_loss(x, shard, batch, loss)
    assert_close(found.total, loss(expected, batch).total, OP_FP32 * 10)
    for got, true, what in zip(
        torch.autograd.grad(found.total, (x, shard.weight)), want, "xw", strict=True
    ):
        assert_close(got, true, OP_BF16, what)


@pytest.mark.parametrize("sizes", [ODD, EVEN], ids=str)
def test_old_log_probs_and_an_update_see_the_same_bits(sizes: tuple[int, int]) -> None:
    seen = []

    class Keep(ByToken):
        def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
            seen.append(stats.logprob.detach().clone())
            return super().__call__(stats, batch)

    x, shard, batch = made(300, sizes, 64, None)
    old = fused_token_stats(x, shard, batch).logprob
    totals = [fused_loss(x, shard, batch, Keep()).total for _ in range(2)]
    first, second = (torch.autograd.grad(total, (x, shard.weight)) for total in totals)
    assert torch.equal(torch.cat(seen), old.repeat(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


PRODUCTS = [
    (1000, 896, 151936),
    (777, 3584, 19008),
    (1, 64, 8),
    (1024, 128, 1024),
    (130, 72, 200),
]  # rows, width, columns


def needs_quack() -> None:
    if kernels_for(torch.device("cuda")).head is None:
        pytest.skip("needs quack-kernels and Hopper")


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
@pytest.mark.parametrize("temperature", [False, True], ids=["plain", "temperature"])
def test_a_product_that_takes_statistics(sizes: tuple[int, int, int], temperature: bool) -> None:
    needs_quack()
    (n, width, columns), draw = sizes, torch.Generator("cuda").manual_seed(0)
    x = torch.randn(n, width, device="cuda", generator=draw).to(torch.bfloat16)
    weight = (
        torch.randn(columns, width, device="cuda", generator=draw)
        .mul_(3 * width**-0.5)
        .to(torch.bfloat16)
    )
    targets = torch.randint(
        -columns // 4, columns + columns // 4 + 1, (n,), device="cuda", generator=draw
    )
    tau = torch.linspace(0.2, 3.0, n, device="cuda") if temperature else None
    torch.empty(1 << 28, device="cuda").fill_(float("nan"))
    given = (x, weight, targets, tau)
    z, stats = quack_head.logit_stats(*given, keep=True)
    assert z is not None
    assert_close(z, x.to(torch.float64) @ weight.to(torch.float64).T, 30 * OP_FP32)
    exactly = reference.vocab_stats(z.to(torch.float64), targets, tau)
    for got, true in zip(combine(stats[None], tau), combine(exactly[None], tau), strict=True):
        for a, b in zip(got, true, strict=True):
            assert_close(a, b, OP_FP32)
    nothing, again = quack_head.logit_stats(*given, keep=False)
    assert nothing is None and torch.equal(again, stats), "what is scored is not what is trained"
    assert torch.equal(quack_head.logit_stats(*given, keep=False)[1], stats)
    order = torch.roll(torch.randperm(n, device="cuda", generator=draw), 8)
    _, moved = quack_head.logit_stats(
        x[order], weight, targets[order], None if tau is None else tau[order], keep=False
    )
    assert torch.equal(moved, stats[order]), "a row's bits depend on where it lies"


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_gradients_of_logits_ask_for_their_products(sizes: tuple[int, int, int]) -> None:
    needs_quack()
    (n, width, columns), draw = sizes, torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(m, width, device="cuda", generator=draw).to(torch.bfloat16)
        for m in (n, columns)
    )
    dz = torch.full((n, columns), float("nan"), device="cuda").view(torch.bfloat16)[:, :columns]
    dz.copy_(torch.randn(n, columns, device="cuda", generator=draw))
    held = torch.randn(columns, width, device="cuda", generator=draw)
    asked = dz.to(torch.float64).T @ x.to(torch.float64)
    for dw, first in (
        (held.clone(), False),
        (torch.full_like(held, float("nan")), True),
        (None, True),
    ):
        dx = torch.full_like(x, float("nan"))
        quack_head.logit_grads_(dz, x, weight, dx, dw, first=first)
        assert_close(dx, dz.to(torch.float64) @ weight.to(torch.float64), OP_BF16)
        if dw is not None:
            assert_close(dw, asked if first else held + asked, 30 * OP_FP32)


def test_products_of_more_than_two_to_the_31_logits() -> None:
    needs_quack()
    (_width, vocab), rows, last = QWEN_7B, 14_400, slice(14_300, 14_400)
    x = torch.randn(rows, 64, device="cuda").to(torch.bfloat16)
    weight = torch.randn(vocab, 64, device="cuda").mul_(0.3).to(torch.bfloat16)
    targets = torch.arange(rows, device="cuda")
    z, stats = quack_head.logit_stats(x, weight, targets, keep=True)
    assert z is not None and z.numel() > 1 << 31
    tail = x[last].to(torch.float64) @ weight.to(torch.float64).T
    assert_close(z[last], tail, OP_FP32 * 30)
    expected, found = (
        combine(one[None]) for one in (reference.vocab_stats(tail, targets[last]), stats[last])
    )
    for got, true in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert_close(got, true, OP_FP32 * 30)


def test_scoring_keeps_no_logits() -> None:
    needs_quack()
    x, shard, batch = made(3072, QWEN_7B, 4096, None)
    fused_token_stats(x, shard, batch)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_token_stats(x, shard, batch)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < len(batch) * QWEN_7B[1] * 4 / 20, f"{extra / 2**20:.0f} MiB"


def test_what_the_package_keeps_compiled_is_known_by_our_source() -> None:
    needs_quack()
    epilogue = importlib.import_module("dovetail.kernels.quack_epilogue")
    key = epilogue.RowStatistics("planes").config_key()
    assert hashlib.sha256(Path(str(epilogue.__file__)).read_bytes()).hexdigest() in key
    assert repr(key[-1]) in repr(epilogue.PLAIN.semantic_key)


def test_a_sure_token_has_no_positive_log_prob() -> None:
    needs_quack()
    x, shard, _batch = made(300, (256, 4096), 300, None)
    z = shard.kernels.logits(x, shard.weight)
    sure = torch.full((len(x),), 1e-3, device="cuda")
    _, stats = quack_head.logit_stats(x, shard.weight, z.argmax(-1), sure, keep=False)
    logprob = combine(stats[None], sure)[0].logprob
    assert (logprob <= 0).all() and (logprob == 0).any()


def test_what_is_no_number_stays_in_its_row() -> None:
    needs_quack()
    x, shard, batch = made(300, (256, 4096), 300, None)
    with torch.no_grad():
        x[7], x[11] = float("nan"), float("inf")
    _, stats = quack_head.logit_stats(x, shard.weight, batch.targets, None, keep=False)
    bad = (~torch.isfinite(combine(stats[None])[0].logprob)).nonzero()[:, 0]
    assert bad.tolist() == [7, 11]


def test_two_shards_combine_to_the_whole() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    z, cut = 5 * torch.randn(50, 9001, device="cuda", generator=draw), 4099
    targets = torch.randint(9001, (50,), device="cuda", generator=draw)
    parts = [
        logprob_triton.vocab_stats(z[:, :cut], targets),
        logprob_triton.vocab_stats(z[:, cut:], targets - cut),
    ]
    stats, normalizer = combine(torch.stack(parts))
    whole, alone = combine(reference.vocab_stats(z.to(torch.float64), targets)[None])
    for a, b in zip((*stats, *normalizer), (*whole, *alone), strict=True):
        assert_close(a, b, OP_FP32)


def test_more_than_two_to_the_31_logits() -> None:
    kernels, (_width, vocab) = kernels_for(torch.device("cuda")), QWEN_7B
    rows, last = 14_400, slice(14_390, 14_400)
    z = torch.empty(rows, vocab, device="cuda").normal_()
    assert z.numel() > 1 << 31
    targets = torch.arange(rows, device="cuda")
    tail = z[last].to(torch.float64)
    _stats, normalizer = combine(logprob_triton.vocab_stats(z, targets, None)[None])
    _, exactly = combine(reference.vocab_stats(tail, targets[last])[None])
    ours = tuple(each[last] for each in normalizer)
    for got, true in zip(ours, exactly, strict=True):
        assert_close(got, true, OP_FP32)
    g, h = torch.ones(rows, device="cuda"), torch.full((rows,), 0.1, device="cuda")
    want = reference.vocab_grad_(tail, targets[last], ours, g[last].to(tail.dtype), h[last])
    assert_close(
        kernels.vocab_grad_(z, targets, normalizer, g, h, dtype=torch.bfloat16)[last], want, OP_BF16
    )


@pytest.mark.parametrize("loss", [Policy(), BySequence()], ids=["three products", "four products"])
def test_nothing_waits_for_the_host_and_memory_is_one_chunk(loss: ByToken) -> None:
    x, shard, batch = made(3072, QWEN_7B, 512, 0.5)
    for _warm in range(2):
        fused_loss(x, shard, batch, loss).total.backward()
    x.grad = shard.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_waiting():
        fused_loss(x, shard, batch, loss).total.backward()
    extra = torch.cuda.max_memory_allocated() - before - x.nbytes - 2 * shard.weight.nbytes
    chunk = max(
        512 * QWEN_7B[1] * 4, shard.weight.nbytes
    )  # the gradient in the weight's own dtype comes last
    assert extra <= chunk + (16 << 20), (
        f"{extra / 2**20:.0f} MiB beyond the gradients, a chunk has {chunk / 2**20:.0f}"
    )
