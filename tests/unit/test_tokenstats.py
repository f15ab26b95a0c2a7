"""Log-prob and entropy from vocabulary shards: against full softmax, finite differences, and logits at the edges."""

import math

import pytest
import torch
from torch import Tensor

from dovetail.batch.loss import TokenStats
from dovetail.kernels.reference import vocab_grad_, vocab_stats
from dovetail.nn.heads import combine
from tests.helpers.large_logits import gradient_errors
from tests.helpers.tolerances import GRADCHECK, OP_FP32, OP_FP64, assert_close


class _Split(torch.autograd.Function):
    """What several ranks do, in one process: statistics of column ranges combined, gradients of each range apart."""

    @staticmethod
    def forward(ctx, z: Tensor, targets: Tensor, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        bounds = list(zip((0, *cuts), (*cuts, z.shape[1]), strict=True))
        shards = [vocab_stats(z[:, a:b].contiguous(), targets - a) for a, b in bounds]
        stats, normalizer = combine(torch.stack(shards))
        ctx.save_for_backward(z, targets, *normalizer)
        ctx.bounds = bounds
        return stats.logprob, stats.entropy

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        z, targets, *normalizer = ctx.saved_tensors
        parts = [
            vocab_grad_(z[:, a:b].clone(), targets - a, normalizer, *grads) for a, b in ctx.bounds
        ]
        return torch.cat(parts, dim=1), None, None


def split_stats(z: Tensor, targets: Tensor, cuts: tuple[int, ...]) -> TokenStats:
    return TokenStats(*_Split.apply(z, targets, cuts))


def full_softmax(z: Tensor, targets: Tensor) -> TokenStats:
    logprobs = z.log_softmax(-1)
    p = logprobs.exp()
    products = torch.where(p > 0, p * torch.where(p > 0, logprobs, 0.0), 0.0)
    return TokenStats(logprobs.gather(-1, targets[:, None])[:, 0], -products.sum(-1))


def logits(
    n: int = 7, vocab: int = 13, dtype: torch.dtype = torch.float64, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    z = scale * torch.randn(n, vocab, generator=draw, dtype=torch.float64)
    return z.to(dtype), torch.randint(vocab, (n,), generator=draw)


@pytest.mark.parametrize("cuts", [(), (5,), (4, 8, 12), (6, 6), (13,)], ids=str)
def test_gradcheck_of_both_outputs_over_any_split(cuts: tuple[int, ...]) -> None:
    """Also with a rank that has no columns: all of its vocabulary is padding."""
    z, targets = logits()
    z.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: split_stats(x, targets, cuts), z, atol=GRADCHECK, rtol=GRADCHECK
    )
    for found, expected in zip(
        split_stats(z, targets, cuts), full_softmax(z, targets), strict=True
    ):
        assert_close(found, expected, OP_FP64)


@pytest.mark.parametrize("cuts", [(), (5,), (4, 8)], ids=str)
def test_impossible_columns_give_finite_numbers_and_no_gradient(cuts: tuple[int, ...]) -> None:
    """-inf logits, one rank's columns all -inf among them: p ln p with p = 0 is 0, in both directions."""
    z, targets = logits(dtype=torch.float32)
    targets = torch.zeros_like(targets)
    z[:, 1] = float("-inf")
    z[2, 4:] = float("-inf")
    z[3, 1:] = float("-inf")  # a certain token
    z.requires_grad_()
    stats = split_stats(z, targets, cuts)
    for found, expected in zip(stats, full_softmax(z.double(), targets), strict=True):
        assert torch.isfinite(found).all()
        assert_close(found, expected, OP_FP32)
    (stats.logprob.sum() + stats.entropy.sum()).backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()
    assert torch.equal(z.grad[torch.isinf(z)], torch.zeros_like(z.grad[torch.isinf(z)]))


@pytest.mark.parametrize("offset", [-150.0, -1e4, 1e4], ids=str)
def test_rows_far_from_zero_do_not_underflow(offset: float) -> None:
    """Rows all below -100, where e^z alone is 0 in float32, and rows where it overflows."""
    z, targets = logits(dtype=torch.float32)
    z = (z + offset).requires_grad_()
    stats = split_stats(z, targets, (5,))
    for found, expected in zip(stats, full_softmax(z.double(), targets), strict=True):
        assert ((found - expected).abs() <= OP_FP32 * max(1.0, abs(offset))).all()
    stats.entropy.sum().backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


def test_gradients_keep_their_digits_at_large_logits() -> None:
    """torch's float32 is off by 1e-4 at deviation 300 and temperature 0.1, e^(z - lse) by 3e-5 at 300 and 1."""
    for case, error in gradient_errors(vocab_stats, vocab_grad_).items():
        assert error <= OP_FP32, (case, error)


def test_a_wide_range_of_logits_keeps_the_entropy() -> None:
    """The shifted first moment does not cancel: near 0 for a certain token, ln V for none."""
    z = torch.tensor([[80.0, 0.0, -80.0, 0.0], [60.0, 60.0, 60.0, 60.0]])
    entropy = split_stats(z, torch.zeros(2, dtype=torch.int64), (2,)).entropy
    assert_close(entropy[1], torch.tensor(math.log(4.0)), OP_FP32)
    assert 0.0 <= float(entropy[0]) <= OP_FP32


def test_a_target_of_another_rank_is_never_read() -> None:
    z, _ = logits(n=2, vocab=4)
    assert torch.equal(vocab_stats(z, torch.tensor([-7, 4]))[:, 3], torch.zeros(2, dtype=z.dtype))
