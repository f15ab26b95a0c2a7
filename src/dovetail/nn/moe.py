"""Mixtures of experts over ep and tp. A token is sent once to each rank of ep that has some of its K experts:

[t, D]   all_gather over tp               [T, D]
         a row for each of its ranks      sorted by rank
         all_to_all over ep               with choices
         mixture of local experts         partial over tp
         all_to_all back, sum over ranks  [T, D]
         reduce_scatter over tp           [t, D]
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec, MoeSpec
from dovetail.batch.routing import Routes
from dovetail.kernels.reference_experts import round_rows
from dovetail.kernels.registry import KernelSet
from dovetail.nn.layers import GradAccumulator, ReplicatedLinear
from dovetail.nn.mlp import GatedMLP
from dovetail.nn.products import Products
from dovetail.parallel.collectives import (
    AsyncHostCopy,
    all_gather,
    begin_all_to_all,
    begin_exchange,
    stack_over,
)
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import (
    AsyncCollective,
    AsyncForward,
    finish,
    reduce_scatter_async,
    run_sync,
    start,
    start_all_gather,
)
from dovetail.parallel.placement import Part, Placement, Split

TINY = 1e-20
T = TypeVar("T")


class Router(nn.Module):
    """[t, D] -> experts and weights (wide) [t, K]. Replayed routes replace experts, not weights."""

    e_score_correction_bias: Tensor

    def __init__(self, spec: ArchSpec, moe: MoeSpec, layer: int, kernels: KernelSet) -> None:
        super().__init__()
        self.moe = moe
        self.layer = layer
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(moe.num_experts, spec.width))
        if moe.bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(moe.num_experts))
        self.placements = {"weight": Placement(partial_over=("tp",))}

    def forward(self, x: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        logits = self.kernels.router_logits(x, self.weight)
        scores = logits.softmax(-1) if self.moe.scores == "softmax" else logits.sigmoid()
        indices = routes.choose(self.layer, partial(self.best, scores.detach()))
        weights = scores.gather(1, indices)
        cost = routes.cost(self.layer, logits, scores)
        if cost is not None:
            weights = _AddRouterLoss.apply(weights, cost)
        if self.moe.normalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + TINY)
        return indices, weights * self.moe.scale

    def best(self, scores: Tensor) -> Tensor:
        """[t, E] -> experts [t, K] of the best groups."""
        moe = self.moe
        if moe.bias:
            scores = scores + self.e_score_correction_bias
        if moe.groups > 1:
            grouped = scores.unflatten(1, (moe.groups, -1))
            counted = 1 if moe.group_score == "max" else 2
            group_scores = grouped.topk(counted).values.sum(-1)
            best = group_scores.topk(moe.kept_groups).indices
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept = kept.scatter(1, best, True)
            dropped = ~kept[:, :, None]
            scores = grouped.masked_fill(dropped, float("-inf")).flatten(1)
        return self.kernels.top_k(scores, moe.top_k)


class Experts(GradAccumulator):
    """Tokens [T, D], experts and weights [T, K] -> [T, D], partial over tp."""

    adapters: nn.ModuleDict  # of `nn.adapters.add_adapters`

    def __init__(self, spec: ArchSpec, moe: MoeSpec, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        self.ep = mesh["ep"]
        self.kernels = kernels
        self.products = Products(kernels)
        tp = mesh["tp"].size
        half = Part.padded("", moe.ffn_width, tp)
        count = moe.num_experts // self.ep.size
        width = half.local_length(tp)
        gate_up = torch.empty(count, 2 * width, spec.width)
        down = torch.empty(count, spec.width, width)
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)
        by_expert = Split(0, "ep", (Part("", moe.num_experts),))
        gate_up_splits = (by_expert, Split(1, "tp", (half, half)))
        down_splits = (by_expert, Split(2, "tp", (half,)))
        self.placements = {
            "gate_up_proj": Placement(gate_up_splits, sharded_over="expert_fsdp"),
            "down_proj": Placement(down_splits, sharded_over="expert_fsdp"),
        }

    def forward(self, run: Callable[..., T], *arguments: Any) -> T:
        """Runs a whole block, with this module's parameters gathered.

        FSDP2 gathers the parameters of a group before its module's forward and frees them after
        it. Experts are a group of their own, and both halves of a batch use them at several times
        of a block. So `decoder.Block.forward` calls this with the block as `run`, and the experts
        compute in `forward_async`, which has no hooks: one gather a block.
        """
        return run(*arguments)

    def forward_async(self, x: Tensor, chosen: Tensor, weights: Tensor) -> AsyncForward[Tensor]:
        ep = self.ep
        kernels = self.kernels
        mixture = self.products.mixture_of_experts
        defer = None if self.wgrad_queue is None else self.defer_wgrad
        if ep.size == 1:
            matrices = self._matrices()
            return mixture(x, chosen, weights, matrices, add=defer)
        here = len(self.gate_up_proj)
        ranks, counts = destinations(chosen // here, ep.size)
        received = begin_exchange(counts, ep).wait()
        rows_sent = counts[:, 0]
        rows_received, copies_received = received.unbind(1)
        numbers = AsyncHostCopy(torch.stack((rows_sent, rows_received, copies_received)))
        capacity = ranks.numel()  # before the host knows the rows
        rows, places, _ = kernels.permute(x, ranks, ep.size, capacity)
        choices = pack_choices(chosen, weights)
        choices = kernels.permute_tokens(choices, places, ranks.shape[1], capacity)
        send_rows = AsyncCollective(None, None)
        send_choices = AsyncCollective(None, None)
        sent_rows = start(rows, send_rows)
        sent_choices = start(choices, send_choices)
        matrices = self._matrices()  # after `start`: their gradients come before the wait
        yield
        to, by, copies = numbers.wait()  # the host's one wait
        num_rows = sum(by)
        exchange = partial(begin_all_to_all, axis=ep)
        for part, collective in ((rows, send_rows), (choices, send_choices)):
            room = round_rows(num_rows)
            collective.collective = partial(exchange, to=to, by=by, room=room)
            collective.inverse = partial(exchange, to=by, by=to, room=len(part))
            collective.start(part)
        rows = finish(sent_rows, send_rows)
        choices = finish(sent_choices, send_choices)
        chosen, weights = unpack_choices(choices)
        chosen = (chosen - ep.rank * here) % (ep.size * here)
        chosen[num_rows:] = here
        y = mixture(rows, chosen, weights, matrices, sum(copies), defer)
        send_back = partial(exchange, to=by, by=to)
        inverse = partial(exchange, to=to, by=by, room=len(y))
        home = AsyncCollective(send_back, inverse)
        returned = start(y, home)
        yield
        returned = finish(returned, home)
        return kernels.unpermute(returned, places.view(ranks.shape), None)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        return self.accumulated("gate_up_proj"), self.accumulated("down_proj")


def destinations(owners: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Owners [T, K] -> distinct ranks [T, min(K, size)], else `size`; rows and copies by rank [size, 2]."""
    every = torch.arange(size, device=owners.device)
    to = owners[:, :, None] == every
    goes = to.any(1)
    ranks = torch.where(goes, every, size)
    most = owners.shape[1]
    if most < size:
        ordered = ranks.sort(1).values
        ranks = ordered[:, :most].contiguous()
    rows = goes.sum(0)
    copies = to.sum((0, 1))
    return ranks, torch.stack((rows, copies), 1)


def pack_choices(chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts, as integers' bits, and weights [T, K] -> [T, 2 K]."""
    integer = torch.int32 if weights.element_size() == 4 else torch.int64
    bits = chosen.to(integer)
    return torch.cat((weights, bits.view(weights.dtype)), 1)


def unpack_choices(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse. Only weights have gradients."""
    weights, bits = packed.chunk(2, dim=1)
    integer = torch.int32 if packed.element_size() == 4 else torch.int64
    return bits.detach().contiguous().view(integer), weights


class MoE(nn.Module):
    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.moe = moe
        self.tp = mesh["tp"]
        self.kernels = kernels
        self.shared_name = moe.shared_name if moe.shared_width else ""
        self.gate = Router(spec, moe, layer, kernels)
        self.experts = Experts(spec, moe, mesh, kernels)
        if self.shared_name:
            self.add_module(self.shared_name, GatedMLP(spec, mesh, kernels, width=moe.shared_width))
        self.shared_expert_gate = (
            ReplicatedLinear(spec.width, 1, kernels) if moe.shared_gate else None
        )

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        return run_sync(self.forward_async(x, routes))

    def forward_async(self, x: Tensor, routes: Routes) -> AsyncForward[Tensor]:
        """Call it within `Experts.forward`."""
        indices, weights = self.gate(x, routes)
        y = yield from self._routed(x, indices, weights)
        if not self.shared_name:
            return y
        mlp = self.get_submodule(self.shared_name)
        assert isinstance(mlp, GatedMLP)
        shared = yield from mlp.forward_async(x)
        if self.shared_expert_gate is not None:
            share = self.shared_expert_gate(x).sigmoid()
            shared = share * shared
        return y + shared

    def _routed(self, x: Tensor, indices: Tensor, weights: Tensor) -> AsyncForward[Tensor]:
        sent, gather = yield from start_all_gather(x, self.tp)
        x = finish(sent, gather)
        weights = all_gather(weights, self.tp)
        chosen = stack_over(indices, self.tp)
        chosen = chosen.flatten(0, 1)
        y = yield from self.experts.forward_async(x, chosen, weights)
        return (yield from reduce_scatter_async(y, self.tp))


class _AddRouterLoss(torch.autograd.Function):
    """Adds `loss` to the loss computed from x, in any stage. forward: x. backward: its gradient, and 1 for the loss."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, _loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())
