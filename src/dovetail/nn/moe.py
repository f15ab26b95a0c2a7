"""Mixtures of experts: a router, the experts cut over ep and tp, and what every token goes through beside them.

A token chooses K of E experts, which some of the ranks of ep have. It goes to each of these ranks once:

    [t, D]   all_gather over tp               [T, D]
             a row for each of its ranks      sorted by rank (stable)
             all_to_all over ep               rows that want experts of this rank, from every rank; with each its choice
             mixture of the experts here      the same rows; features are cut over tp, so these are partial sums
             all_to_all back, sum over ranks  [T, D]
             reduce_scatter over tp           [t, D]

Every way back is the inverse permutation: no gradient is added atomically, so equal inputs give equal bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec, MoeSpec
from dovetail.batch.routing import Routes
from dovetail.kernels.registry import KernelSet, mixture_of_experts
from dovetail.kernels.token_permute import round_rows
from dovetail.nn.grad_accumulation import Adder
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.mlp import GatedMLP
from dovetail.parallel.collectives import AsyncHostCopy, all_gather, begin_all_to_all, begin_exchange, stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import (
    AsyncCollective,
    AsyncForward,
    async_all_gather,
    finish,
    reduce_scatter_async,
    run_sync,
    start,
    switch,
)
from dovetail.parallel.placement import Part, Placement, Split

TINY = 1e-20  # keeps the sum of chosen weights from being 0
T = TypeVar("T")


class Router(nn.Module):
    """[t, D] -> each token's experts [t, K] and their weights [t, K], in the wide dtype. Sees only this rank's tokens.

    Given experts replace the choice; their weights are gathered from the live scores, so the router learns either way.
    """

    e_score_correction_bias: Tensor

    def __init__(self, spec: ArchSpec, moe: MoeSpec, layer: int, kernels: KernelSet) -> None:
        super().__init__()
        self.moe, self.layer, self.kernels = moe, layer, kernels
        self.weight = nn.Parameter(torch.empty(moe.num_experts, spec.width))
        if moe.bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(moe.num_experts))
        self.placements = {"weight": Placement(partial_over=("tp",))}

    def forward(self, x: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        logits = self.kernels.router_logits(x, self.weight)
        scores = logits.softmax(-1) if self.moe.scores == "softmax" else logits.sigmoid()
        indices = routes.choose(self.layer, partial(self.best, scores.detach()))
        weights = with_cost(scores.gather(1, indices), routes.cost(self.layer, logits, scores))
        if self.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return indices, weights * self.moe.scale

    def best(self, scores: Tensor) -> Tensor:
        """[t, E] -> [t, K]: the experts with the best scores, of the best groups."""
        moe = self.moe
        if moe.bias:
            scores = scores + self.e_score_correction_bias
        if moe.groups > 1:
            grouped = scores.unflatten(1, (moe.groups, -1))
            worth = grouped.topk(1 if moe.group_score == "max" else 2).values.sum(-1)
            kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(moe.kept_groups).indices, True)
            scores = grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
        return self.kernels.top_k(scores, moe.top_k)


class Experts(Adder):
    """Tokens [T, D] and their experts and weights [T, K] -> weighted sums over the experts [T, D]: partial sums over tp.

    One parameter a product, for all of this rank's experts. forward and backward: two all_to_all over ep of a row for each
    token and rank, and one of what is chosen there.
    """

    def __init__(self, spec: ArchSpec, moe: MoeSpec, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        self.ep, self.kernels = mesh["ep"], kernels
        half = Part.padded("", moe.ffn_width, mesh["tp"].size)
        count, width = moe.num_experts // self.ep.size, half.local_length(mesh["tp"].size)
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, spec.width))
        self.down_proj = nn.Parameter(torch.empty(count, spec.width, width))
        by_expert = Split(0, "ep", (Part("", moe.num_experts),))
        self.placements = {
            "gate_up_proj": Placement((by_expert, Split(1, "tp", (half, half))), sharded_over="expert_fsdp"),
            "down_proj": Placement((by_expert, Split(2, "tp", (half,))), sharded_over="expert_fsdp"),
        }

    def forward(self, run: Callable[..., T], *given: Any) -> T:
        """Whatever needs these experts' parameters: FSDP2 has them gathered meanwhile, once for both halves of a batch."""
        return run(*given)

    def turns(self, x: Tensor, chosen: Tensor, weights: Tensor) -> AsyncForward[Tensor]:
        """What this module is for, as a generator. The host learns how many rows go where while the other half computes."""
        ep, kernels = self.ep, self.kernels
        add = None if self.adds is None else self.add
        if ep.size == 1:
            return mixture_of_experts(kernels, x, chosen, weights, self._matrices(), None, add)
        here = len(self.gate_up_proj)
        ranks, counts = destinations(chosen // here, ep.size)
        coming = begin_exchange(counts, ep).take()
        numbers = AsyncHostCopy(torch.stack((counts[:, 0], coming[:, 0], coming[:, 1])))
        room = ranks.numel()  # for a row of each; how many there are, the host learns while they are written
        rows, places, _ = kernels.permute(x, ranks, ep.size, room)
        notes = kernels.permute_tokens(noted(chosen, weights), places, ranks.shape[1], room)
        to_experts = [AsyncCollective(None, None), AsyncCollective(None, None)]
        sent = [start(each, crossing) for each, crossing in zip((rows, notes), to_experts, strict=True)]
        matrices = self._matrices()  # after what leaves, so that their gradients come before it is waited for
        yield
        to, by, copies = numbers.take()  # the host waits once
        came, room = sum(by), round_rows(sum(by))
        for each, crossing in zip((rows, notes), to_experts, strict=True):
            crossing.there = partial(begin_all_to_all, to=to, by=by, axis=ep, room=room)
            crossing.back = partial(begin_all_to_all, to=by, by=to, axis=ep, room=len(each))
            crossing.begin(each)
        rows, notes = (finish(each, crossing) for each, crossing in zip(sent, to_experts, strict=True))
        chosen, weights = read(notes)
        chosen = (chosen - ep.rank * here) % (ep.size * here)  # experts of other ranks lie behind those of this one
        chosen[came:] = here
        y = mixture_of_experts(kernels, rows, chosen, weights, matrices, sum(copies), add)
        home = AsyncCollective(
            partial(begin_all_to_all, to=by, by=to, axis=ep),
            partial(begin_all_to_all, to=to, by=by, axis=ep, room=len(y)),
        )
        left = start(y, home)
        yield
        return kernels.unpermute(finish(left, home), places.view(ranks.shape), None)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        return self.summed("gate_up_proj"), self.summed("down_proj")


def destinations(owners: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The ranks that have a token's experts, [T, K] -> each once, [T, min(K, size)], beside `size` for none; and how many rows
    and how many copies go to each rank, [size, 2].
    """
    every = torch.arange(size, device=owners.device)
    to = owners[:, :, None] == every
    goes = to.any(1)  # [T, size]
    ranks, most = torch.where(goes, every, size), owners.shape[1]
    if most < size:
        ranks = ranks.sort(1).values[:, :most].contiguous()
    return ranks, torch.stack((goes.sum(0), to.sum((0, 1))), 1)


def noted(chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts and weights [T, K] as one tensor [T, 2 K] that can travel: the weights, and the bits of whole numbers."""
    whole = torch.int32 if weights.element_size() == 4 else torch.int64
    return torch.cat((weights, chosen.to(whole).view(weights.dtype)), 1)


def read(notes: Tensor) -> tuple[Tensor, Tensor]:
    """What `noted` wrote: experts, and weights, which alone have gradients."""
    weights, bits = notes.chunk(2, dim=1)
    whole = torch.int32 if notes.element_size() == 4 else torch.int64
    return bits.detach().contiguous().view(whole), weights


class MoE(nn.Module):
    """[t, D] -> [t, D]: routed experts, and shared ones where the family has them, behind a gate where it says so."""

    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.moe, self.tp, self.kernels = moe, mesh["tp"], kernels
        self.shared_name = moe.shared_name if moe.shared_width else ""
        self.gate = Router(spec, moe, layer, kernels)
        self.experts = Experts(spec, moe, mesh, kernels)
        if self.shared_name:
            self.add_module(self.shared_name, GatedMLP(spec, mesh, kernels, width=moe.shared_width))
        self.shared_expert_gate = ReplicatedLinear(spec.width, 1) if moe.shared_gate else None

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        return run_sync(self.turns(x, routes))

    def turns(self, x: Tensor, routes: Routes) -> AsyncForward[Tensor]:
        """The same, as a generator, for those who have the experts' parameters gathered."""
        y = yield from self._routed(x, *self.gate(x, routes))
        if not self.shared_name:
            return y
        mlp = self.get_submodule(self.shared_name)
        assert isinstance(mlp, GatedMLP)
        shared = yield from mlp.turns(x)
        return y + (shared if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * shared)

    def _routed(self, x: Tensor, indices: Tensor, weights: Tensor) -> AsyncForward[Tensor]:
        left = start(x, crossing := async_all_gather(self.tp))
        yield from switch(self.tp)
        x, weights = finish(left, crossing), all_gather(weights, self.tp)
        chosen = stack_over(indices, self.tp).flatten(0, 1)  # [T, K]
        y = yield from self.experts.turns(x, chosen, weights)
        return (yield from reduce_scatter_async(y, self.tp))


class _WithCost(torch.autograd.Function):
    """forward: x. backward: its gradient, and 1 for the cost, which thereby joins whatever loss x leads to."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, _cost: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


def with_cost(x: Tensor, cost: Tensor | None) -> Tensor:
    """`x`, with `cost` added to the loss that it is on its way to, in whichever pipeline stage that is computed."""
    return x if cost is None else _WithCost.apply(x, cost)
