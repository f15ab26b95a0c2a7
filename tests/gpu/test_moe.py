"""A mixture of experts on a CUDA device: rows, choices, the router's gradient and the whole layer, without asking the host."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dovetail.arch.registry import spec_from_config
from dovetail.batch.routing import Routes, RoutingTrace
from dovetail.kernels import reference_experts
from dovetail.kernels.registry import KernelSet, kernels_for
from dovetail.nn.moe import MoE
from dovetail.parallel.mesh import Mesh
from tests.helpers.gpu_blocks import poison
from tests.helpers.gpu_waits import no_waiting
from tests.helpers.tolerances import HALF_SHARE, OP_BF16, OP_FP32, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

SHAPE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
TOKENS = 4099


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(("experts", "copies"), [(128, 8), (70_000, 2), (1, 1), (64, 6)])
def test_rows_to_experts_and_back(experts: int, copies: int) -> None:
    kernels = kernels_for(torch.device("cuda"))
    x, draw = drawn(TOKENS, 2048).requires_grad_(), torch.Generator("cuda").manual_seed(1)
    chosen = (
        torch.rand(TOKENS, min(experts, 512), device="cuda", generator=draw).topk(copies).indices
    )
    chosen[: TOKENS // 2] = torch.arange(
        copies, device="cuda"
    )  # half of the tokens go to the first ones
    weights = torch.rand(TOKENS, copies, device="cuda", generator=draw).requires_grad_()
    up = drawn(TOKENS, 2048, seed=2)
    poison()
    found = []
    for one in (kernels, kernels, KernelSet()):
        moved, rows, ends = one.permute(x, chosen, experts)
        y = one.unpermute(moved * 2, rows, weights)
        found.append((moved, rows, ends, y, *torch.autograd.grad(y, (x, weights), up)))
    ours, again, expected = found
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1].long(), expected[1]) and torch.equal(ours[2], expected[2])
    for a, b in zip(ours[3:], expected[3:], strict=True):
        assert_close(a, b, OP_BF16)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_rows_of_whom_some_go_nowhere(share: float) -> None:
    kernels, draw = kernels_for(torch.device("cuda")), torch.Generator("cuda").manual_seed(1)
    x, up = drawn(TOKENS, 2048).requires_grad_(), drawn(TOKENS, 2048, seed=2)
    chosen = torch.rand(TOKENS, 64, device="cuda", generator=draw).topk(8).indices
    chosen = torch.where(
        torch.rand(chosen.shape, device="cuda", generator=draw) < share, chosen, 64 + chosen % 3
    )
    weights = torch.rand(TOKENS, 8, device="cuda", generator=draw).requires_grad_()
    total = int((chosen < 64).sum())
    poison()
    found = []
    for one, room in ((kernels, total), (kernels, chosen.numel()), (KernelSet(), total)):
        moved, rows, ends = one.permute(x, chosen, 64, room)
        left = moved[:total] * 2
        plain = one.unpermute(left, rows.view(chosen.shape), None)
        y = one.unpermute(left, rows, weights)
        grads = torch.autograd.grad((y, plain), (x, weights), (up, up))
        found.append((moved[:total], rows, ends, y, plain, *grads))
        assert bool((grads[1][chosen >= 64] == 0).all())
    ours, roomy, expected = found
    assert all(torch.equal(a, b) for a, b in zip(ours, roomy, strict=True))
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1].long(), expected[1]) and torch.equal(ours[2], expected[2])
    for a, b in zip(ours[3:], expected[3:], strict=True):
        assert_close(a, b, OP_BF16)


def test_the_choice_is_torchs_and_stays_within_the_experts() -> None:
    kernels = kernels_for(torch.device("cuda"))
    scores = torch.rand(TOKENS, 129, device="cuda").softmax(-1)
    assert torch.equal(
        kernels.top_k(scores, 8).sort(-1).values, reference_experts.top_k(scores, 8).sort(-1).values
    )
    scores[0], scores[1], scores[2, 1:], scores[3] = float("nan"), float("-inf"), -0.0, 0.5
    found = kernels.top_k(scores, 8)
    assert bool(((found >= 0) & (found < 129)).all())
    assert all(len(row.unique()) == 8 for row in found[:4])
    assert found[3].tolist() == list(range(8))


def test_the_router_learns_from_what_bfloat16_would_lose() -> None:
    """Gradients of 1 and a thousandth that differ; of the weights' gradient only the difference is left."""
    kernels = kernels_for(torch.device("cuda"))
    x = torch.ones(4096, 64, device="cuda", dtype=torch.bfloat16)
    x[1::2] = -1
    x, weight = x.requires_grad_(), drawn(128, 64).requires_grad_()
    dz = 1 + 2.0**-11 * torch.rand(4096, 128, device="cuda")
    z = kernels.router_logits(x, weight)
    assert z.dtype == torch.float32
    exact = [t.detach().to(torch.float64).requires_grad_() for t in (x, weight)]
    wanted = exact[0] @ exact[1].T
    assert_close(z, wanted, 10 * OP_FP32)
    for a, b in zip(
        torch.autograd.grad(z, (x, weight), dz),
        torch.autograd.grad(wanted, exact, dz.to(torch.float64)),
        strict=True,
    ):
        assert_close(a, b, OP_BF16)


def layer(kernels: KernelSet, dtype: torch.dtype) -> MoE:
    spec = spec_from_config({"model_type": "qwen3_moe", "norm_topk_prob": True, **SHAPE})
    moe = MoE(spec, 0, Mesh.solo(torch.device("cuda")), kernels).to("cuda")
    for seed, parameter in enumerate(moe.parameters()):
        parameter.data = (0.03 * drawn(*parameter.shape, seed=seed)).to(dtype)
    return moe


def both_ways(moe: MoE, x: Tensor, routes: Routes) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = moe(leaf, routes)
    return [y.detach(), *torch.autograd.grad(y, (leaf, *moe.parameters()), torch.ones_like(y))]


def test_the_layer_is_as_exact_as_the_reference_and_equal_twice() -> None:
    kernels, x = kernels_for(torch.device("cuda")), drawn(1024, 2048)
    with torch.no_grad():
        indices, _ = layer(kernels, torch.bfloat16).gate(x, Routes())
    trace = RoutingTrace(
        (0,), indices[:, None].to(torch.int32), torch.ones(len(x), dtype=torch.bool, device="cuda")
    )
    exact = both_ways(layer(KernelSet(), torch.float64), x.to(torch.float64), Routes(trace))
    plain = both_ways(
        layer(replace(KernelSet(), grouped_mm=kernels.grouped_mm), x.dtype), x, Routes(trace)
    )
    poison()
    ours, again = (both_ways(layer(kernels, x.dtype), x, Routes(trace)) for _ in range(2))
    for a, b, theirs, true in zip(ours, again, plain, exact, strict=True):
        assert torch.equal(a, b)
        error, plainly = ((found.to(torch.float64) - true).norm() for found in (a, theirs))
        assert float(error) <= HALF_SHARE * float(plainly)


def test_the_layer_never_waits_for_the_host() -> None:
    moe, x = layer(kernels_for(torch.device("cuda")), torch.bfloat16), drawn(1024, 2048)
    both_ways(moe, x, Routes())
    torch.cuda.synchronize()
    with no_waiting():
        both_ways(moe, x, Routes())
