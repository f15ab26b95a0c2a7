"""The block's kernels on a CUDA device: against the reference, equal bits twice, no waiting for the host, no recompiling."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.kernels import reference
from dovetail.kernels.registry import KernelSet, kernels_for
from tests.helpers.gpu_blocks import poison
from tests.helpers.gpu_waits import no_waiting
from tests.helpers.tolerances import OP_BF16, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

TOKENS, WIDTH, FFN, CHANNELS = (
    4099,
    3584,
    18944,
    128,
)  # of a 7B, and a number of tokens that divides by nothing
GAIN = (
    2 * OP_BF16
)  # the reference rounds what every row asks of a gain, and then their sum; ours rounds the sum
Op = Callable[[KernelSet, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _heads(
    k: KernelSet, x: Tensor, q_gain: Tensor, k_gain: Tensor, *, normed: bool
) -> tuple[Tensor, ...]:
    angles = torch.arange(len(x), device=x.device)[:, None] * torch.logspace(
        0, -4, CHANNELS // 2, device=x.device
    )
    tables = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    gains = (q_gain[:CHANNELS], k_gain[:CHANNELS]) if normed else None
    out: tuple[Tensor, ...] = k.heads(x[:, : 32 * CHANNELS], (24, 4), *tables, gains, 1e-6)
    return out


OPS: dict[str, Op] = {
    "rms_norm": lambda k, x, w, _: (k.rms_norm(x[:, :WIDTH], w, 1e-6),),
    "add_norm": lambda k, x, w, _: k.add_norm(x[:, :WIDTH], x[:, WIDTH : 2 * WIDTH], w, 1e-6),
    "heads": partial(_heads, normed=False),
    "heads, normed": partial(_heads, normed=True),
    "swiglu": lambda k, x, _, __: (k.swiglu(x),),
}


def drawn(tokens: int) -> list[Tensor]:
    """What an operation takes some of: rows of gates and ups, and two gains."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = ((tokens, 2 * FFN), (WIDTH,), (WIDTH,))
    return [
        torch.randn(s, device="cuda", generator=draw).to(torch.bfloat16).requires_grad_()
        for s in shapes
    ]


def both_ways(kernels: KernelSet, op: Op, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients."""
    outputs = list(op(kernels, *given))
    draw = torch.Generator("cuda").manual_seed(1)
    up = [torch.randn(y.shape, device="cuda", generator=draw).to(y.dtype) for y in outputs]
    grads = torch.autograd.grad(outputs, given, up, allow_unused=True)
    return [y.detach() for y in outputs], [g for g in grads if g is not None]


def test_small_and_odd_ones_equal_the_reference() -> None:
    from tests.helpers.block_rows import check, measure

    poison()
    check(measure("cuda"), GAIN, rounds=True)
    chosen = kernels_for(torch.device("cuda")).describe()
    assert {chosen[op] for op in ("rms_norm", "add_norm", "swiglu", "sum_deterministic")} == {
        "norm_triton"
    }
    assert {chosen[op] for op in ("heads", "rope")} == {"rope_triton"}
    assert {chosen[op] for op in ("permute", "unpermute", "permute_tokens", "top_k")} == {
        "moe_triton"
    }


@pytest.mark.parametrize("name", OPS)
def test_those_of_a_7b_equal_the_reference_and_themselves(name: str) -> None:
    given, kernels = drawn(TOKENS), kernels_for(torch.device("cuda"))
    expected = both_ways(KernelSet(), OPS[name], given)
    poison()
    found = [both_ways(kernels, OPS[name], given) for _ in range(2)]
    for actual, wanted in zip(found[0], expected, strict=True):
        for a, b in zip(actual, wanted, strict=True):
            assert_close(a, b, GAIN, name)
    for first, second in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_nothing_waits_for_the_host(name: str) -> None:
    given, kernels = drawn(64), kernels_for(torch.device("cuda"))
    both_ways(kernels, OPS[name], given)
    outputs = OPS[name](kernels, *given)
    up = [torch.ones_like(y) for y in outputs]
    with no_waiting():
        torch.autograd.grad(OPS[name](kernels, *given), given, up, allow_unused=True)


def test_more_than_two_to_the_31_numbers() -> None:
    rows, last = (1 << 31) // (2 * FFN) + 10, slice(-5, None)
    x = torch.empty(rows, 2 * FFN, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    tail = x.detach()[last].clone().requires_grad_()
    y, small = kernels_for(x.device).swiglu(x), reference.swiglu(tail)
    assert_close(y[last], small, OP_BF16)
    up = torch.randn_like(small)
    (grad,) = torch.autograd.grad(y, x, torch.cat((torch.zeros_like(y[:-5]), up)))
    assert_close(grad[last], torch.autograd.grad(small, tail, up)[0], OP_BF16)
    assert not grad[:-5].any()


def test_parts_are_added_in_order_with_equal_bits() -> None:
    """As many as the keys' and values' gradients of a 7B by eight ranks, each line's 16,384 tokens; nothing waits."""
    draw = torch.Generator("cuda").manual_seed(0)
    parts = torch.randn(8, 2, 16384, 4, CHANNELS, device="cuda", generator=draw)
    parts = (parts * torch.randn(parts.shape, device="cuda", generator=draw).mul_(3).exp_()).to(
        torch.bfloat16
    )
    kernels = kernels_for(parts.device)
    expected = reference.sum_deterministic(parts)
    poison()
    kernels.sum_deterministic(parts)
    with no_waiting():
        found = kernels.sum_deterministic(parts)
    assert torch.equal(found, expected)
    assert not torch.equal(found, reference.sum_deterministic(parts.flip(0)))


def test_a_number_of_tokens_never_compiles_again() -> None:
    """A variant for each kernel and model, whatever divides the tokens."""
    from dovetail.kernels import norm_triton, rope_triton

    kernels = kernels_for(torch.device("cuda"))
    jitted: list[Any] = [
        norm_triton._norm,
        norm_triton._norm_grad,
        norm_triton._swiglu,
        norm_triton._swiglu_grad,
    ]
    jitted += [norm_triton._columns, rope_triton._rotate, rope_triton._rotate_grad]

    def variants() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in jitted]

    for op in OPS.values():
        both_ways(kernels, op, drawn(48))
    before = variants()
    for tokens in (1, 2, 16, 17, 1024, 4099):
        for op in OPS.values():
            both_ways(kernels, op, drawn(tokens))
    assert variants() == before
