"""Routing by the book: choices, weights, balance costs and their gradients against plain formulas; traces on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.batch.routing import Balance, Routes, RoutingTrace
from dovetail.engine.expert_routing import BalanceSettings, Routing
from dovetail.kernels.reference_experts import inverse_of, permute_tokens
from dovetail.kernels.registry import KernelSet
from dovetail.nn.moe import MoE, Router
from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh
from dovetail.run.metrics import write_routes
from tests.helpers.checkpoints import read_routes
from tests.helpers.parity_configs import moe_configs
from tests.helpers.tolerances import EXACT, GRADCHECK, OP_FP64, assert_close

E, K, T = 8, 3, 11


def router_of(**options: Any) -> Router:
    spec = spec_from_config(moe_configs()["qwen3_moe"].to_dict())
    assert spec.moe is not None
    moe = replace(spec.moe, **options)
    torch.manual_seed(0)
    router = Router(spec, moe, 0, KernelSet()).to(torch.float64)
    with torch.no_grad():
        router.weight.normal_()
    return router


def hidden(tokens: int = T) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(tokens, 64, dtype=torch.float64)


def balance(lengths: tuple[int, ...] = (4, 5, 2), counted: int = 9, **options: float) -> Balance:
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Balance(
        torch.arange(sum(lengths)) < counted, owner, torch.tensor(lengths), (Axis("tp"),), **options
    )


def test_groups_are_ranked_before_their_experts() -> None:
    """Of four groups of two, the two with the best sum or the best expert; the bias counts for the choice alone."""
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2, 0.6, 0.35]], dtype=torch.float64)
    for kind, expected in (("max", {0, 6, 7}), ("top2", {2, 3, 6})):
        best = router_of(groups=4, kept_groups=2, group_score=kind).best(scores)
        assert set(best[0].tolist()) == expected
    router = router_of(bias=True, scores="sigmoid")
    router.e_score_correction_bias = torch.zeros(E)
    x = hidden()
    plain, weights = router(x, Routes())
    router.e_score_correction_bias[5] = 10.0
    moved, biased = router(x, Routes())
    assert (moved == 5).any(-1).all() and not (plain == 5).any(-1).all()
    live = (x @ router.weight.T).sigmoid()
    normal = live.gather(1, moved)
    assert_close(biased, normal / normal.sum(-1, keepdim=True), OP_FP64)
    assert_close(weights.sum(-1), torch.ones(T, dtype=torch.float64), OP_FP64)


def test_biases_move_by_loads_and_not_in_a_skipped_step() -> None:
    router = router_of(bias=True, scores="sigmoid")
    router.e_score_correction_bias = torch.zeros(E)
    spec = spec_from_config(moe_configs()["qwen3_moe"].to_dict())
    assert spec.moe is not None
    moe = replace(spec.moe, bias=True)
    model: Any = torch.nn.Sequential(router)
    routing = Routing(model, moe, Mesh.solo(), BalanceSettings(bias_rate=0.5))
    loads = torch.full((len(moe.numbers), E), 2.0, dtype=torch.float64)
    loads[0, :2] = torch.tensor([4.0, 0.0])
    totals = loads, torch.zeros(len(moe.numbers), 2)
    for skipped, expected in ((True, [0.0, 0.0]), (False, [-0.5, 0.5])):
        metrics = routing.update([totals], T, skipped=skipped)
        assert router.e_score_correction_bias.tolist() == [*expected, *[0.0] * (E - 2)]
    others = len(moe.numbers) - 1
    assert metrics == {
        "expert_load_max": (2 + others) / (1 + others),
        "expert_load_min": others / (1 + others),
    }


def test_given_experts_replace_the_choice_and_gather_live_scores() -> None:
    router, x = router_of(scale=2.0), hidden()
    given = torch.randint(E, (T, 1, K), dtype=torch.int32)
    valid = torch.arange(T) % 3 > 0
    indices, weights = router(x, Routes(RoutingTrace((0,), given, valid)))
    own, _ = router(x, Routes())
    assert torch.equal(indices, torch.where(valid[:, None], given[:, 0].long(), own))
    scores = (x @ router.weight.T).softmax(-1).gather(1, indices)
    assert_close(weights, 2 * scores / scores.sum(-1, keepdim=True), OP_FP64)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balance_costs_are_those_of_the_formula(scores: str) -> None:
    """By sequence, without padding; and what they add to the gradient of the router is their own.

    The shares of a token's experts sum to 1, of sigmoids too (DeepSeek-V3, equation 19).
    """
    router, x = router_of(scores=scores), hidden()
    b = balance(aux_coef=0.7, z_coef=0.3, weight=0.5)
    routes = Routes(balance=b)
    indices, weights = router(x, routes)
    (grad,) = torch.autograd.grad((weights * 0).sum(), router.weight)
    logits = x @ router.weight.T
    gates = logits.sigmoid()
    p = logits.softmax(-1) if scores == "softmax" else gates / gates.sum(-1, keepdim=True)
    cost = torch.zeros((), dtype=torch.float64)
    for sequence, length in enumerate(b.lengths.tolist()):
        mine = (b.owner == sequence) & b.counted
        f = (
            torch.bincount(indices[mine].flatten(), minlength=E).to(torch.float64)
            * E
            / (K * length)
        )
        cost = (
            cost
            + 0.7 * (f * p[mine].sum(0)).sum()
            + 0.3 * logits[mine].logsumexp(-1).square().sum()
        )
    (expected,) = torch.autograd.grad(0.5 * cost, router.weight)
    assert_close(grad, expected, OP_FP64)
    assert int(routes.loads[0].sum()) == 9 * K
    assert_close(
        b.aux_coef * routes.costs[0][0] + b.z_coef * routes.costs[0][1], cost.detach(), OP_FP64
    )


def test_an_even_load_costs_one_a_token() -> None:
    router, b = router_of(), balance(lengths=(8,), counted=8, aux_coef=1.0)
    with torch.no_grad():
        router.weight.zero_()
    routes = Routes(balance=b)
    routes.chosen[0] = torch.stack([(torch.arange(8) + i) % E for i in range(K)], 1).to(torch.int32)
    router(hidden(8), routes)
    assert_close(routes.costs[0][0], torch.tensor(8.0, dtype=torch.float64), OP_FP64)


def test_rows_travel_by_permutations_both_ways() -> None:
    order = torch.randperm(12)
    assert torch.equal(order[inverse_of(order)], torch.arange(12))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for rows in (order, order.to(torch.int32)):  # as some devices sort
        assert torch.equal(permute_tokens(x, rows, 3)[rows], x.repeat_interleave(3, 0))
        assert torch.autograd.gradcheck(
            lambda y, rows=rows: permute_tokens(y, rows, 3), x, atol=GRADCHECK
        )


def block(**options: Any) -> tuple[MoE, ArchSpec]:
    spec = spec_from_config(moe_configs()["qwen3_moe"].to_dict())
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, **options))
    torch.manual_seed(0)
    moe = MoE(spec, 0, Mesh.solo(), KernelSet()).to(torch.float64)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return moe, spec


def test_every_token_is_the_weighted_sum_of_its_experts_and_empty_ones_get_zeros() -> None:
    moe, spec = block()
    x, indices = (
        hidden(5),
        torch.tensor([[0, 1, 2]] * 4 + [[7, 0, 7]]),
    )  # four experts have none; one comes twice
    routes = Routes(
        RoutingTrace((0,), indices[:, None].to(torch.int32), torch.ones(5, dtype=torch.bool))
    )
    y = moe(x, routes)
    _, weights = moe.gate(x, routes)
    expected = torch.zeros_like(x)
    for t in range(5):
        for k in range(3):
            gate, up = (moe.experts.gate_up_proj[indices[t, k]] @ x[t]).chunk(2)
            hidden_ = torch.nn.functional.silu(gate) * up
            expected[t] += weights[t, k] * (moe.experts.down_proj[indices[t, k]] @ hidden_)
    assert_close(y, expected, OP_FP64)
    y.sum().backward()
    grad = moe.experts.gate_up_proj.grad
    assert grad is not None and spec.moe is not None
    assert [bool(g.any()) for g in grad] == [e in (0, 1, 2, 7) for e in range(E)]


def test_equal_inputs_give_equal_bits() -> None:
    moe, _ = block()
    x = hidden(64)
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        moe.zero_grad()
        y = moe(leaf, Routes())
        y.square().sum().backward()
        found.append((y.detach(), leaf.grad, moe.gate.weight.grad, moe.experts.down_proj.grad))
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None
        assert_close(a, b, EXACT)


@pytest.mark.parametrize("experts", [256, 257, 65_536, 65_537, 70_000])
def test_edge_36_stored_routes_do_not_wrap(tmp_path: Path, experts: int) -> None:
    traces = [
        RoutingTrace(
            (3, 5), torch.randint(experts, (n, 2, K), dtype=torch.int32), torch.rand(n) < 0.5
        )
        for n in (4, 1, 7)
    ]
    traces[0].indices[0, 0, 0] = experts - 1
    write_routes(tmp_path / "routes.safetensors", traces)
    width = 1 if experts <= 256 else 2 if experts <= 65_536 else 4
    assert (tmp_path / "routes.safetensors").stat().st_size < 12 * 2 * K * width + 600
    for found, expected in zip(read_routes(tmp_path / "routes.safetensors"), traces, strict=True):
        assert found.layers == expected.layers
        assert torch.equal(found.indices, expected.indices) and torch.equal(
            found.valid, expected.valid
        )
    write_routes(tmp_path / "none.safetensors", [None, None])
    assert not (tmp_path / "none.safetensors").exists()


def test_agreement_is_of_sets_that_both_know() -> None:
    ones = torch.ones(3, dtype=torch.bool)
    a = RoutingTrace((0,), torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]]), ones)
    b = RoutingTrace(
        (0,), torch.tensor([[[2, 1]], [[3, 5]], [[0, 0]]]), torch.tensor([True, True, False])
    )
    assert a.agreement(b) == 0.5
    assert a.agreement(replace(b, valid=~ones)) == 1.0
