"""What an engine does about experts: traces in and out, the cost of uneven loads, and biases that even them out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.batch import LossFn, MicroBatch
from dovetail.comm import sum_over
from dovetail.mesh import Mesh
from dovetail.nn.model import StagedModel
from dovetail.nn.moe import Router
from dovetail.routing import Balance, Routes, RoutingTrace
from dovetail.tokenstats import TokenStats

Placed = Sequence[tuple[Tensor, MicroBatch]]  # this replica's micro-batches, and where in the batch their tokens lie


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """How training evens out what experts get. The coefficients are those of `routing.Balance`; bias_rate: by how much a step
    moves the bias of an expert with too few or too many tokens (arXiv 2408.15664), where the family has such biases."""

    aux_coef: float = 0.0
    z_coef: float = 0.0
    bias_rate: float = 0.0


def with_routes(micro: MicroBatch, mesh: Mesh) -> MicroBatch:
    """`micro` ready to note routes, taking those that its batch brings along."""
    trace = micro.batch.routing
    return replace(micro, routes=Routes(None if trace is None else trace.map(lambda x: x[_mine(micro, mesh)])))


def with_balance(pairs: Placed, settings: BalanceSettings, weight: float, mesh: Mesh) -> None:
    """Have the micro-batches of a training step note loads, and charge for them. `weight`: of one token's cost."""
    for where, micro in pairs:
        rows, batch = _mine(micro, mesh), micro.batch
        assert micro.routes is not None
        micro.routes.balance = Balance(
            counted=rows < len(where),
            owner=batch.sequence_ids[rows],
            lengths=torch.tensor(batch.lengths, device=rows.device),
            axes=(mesh["tp"], mesh["cp"]),
            aux_coef=settings.aux_coef,
            z_coef=settings.z_coef,
            weight=weight,
        )


def expected_count(loss: LossFn, pairs: Placed, mesh: Mesh, *, values: bool) -> float:
    """What `loss` will count over all micro-batches: a loss's count is a matter of its tokens, not of what they cost."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for _, micro in pairs:
        blank = torch.zeros(len(micro.all_counted), device=mesh.device)
        total += torch.as_tensor(loss(blank if values else TokenStats(blank, blank), micro.all_counted).count)
    return float(sum_over(total, mesh["dp"]))


def gather_trace(pairs: Placed, moe: MoeSpec, tokens: int, mesh: Mesh) -> RoutingTrace:
    """The routes of all tokens of a batch, on every rank. Collective."""
    indices = torch.zeros(tokens, len(moe.numbers), moe.top_k, dtype=torch.int32, device=mesh.device)
    for where, micro in pairs:
        rows = _mine(micro, mesh)
        real = rows < len(where)
        assert micro.routes is not None
        for layer, chosen in micro.routes.chosen.items():
            indices[where[rows[real]], moe.numbers.index(layer)] = chosen[real]
    for name in ("tp", "fsdp", "pp"):
        indices = sum_over(indices, mesh[name])
    return RoutingTrace(moe.numbers, indices, torch.ones(tokens, dtype=torch.bool, device=mesh.device))


def step_loads(pairs: Placed, moe: MoeSpec, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """How many tokens of a step each expert of each routing layer had, [M, E], and the sums of both costs, [M, 2]. Collective."""
    loads = torch.zeros(len(moe.numbers), moe.num_experts, dtype=torch.float64, device=mesh.device)
    costs = torch.zeros(len(moe.numbers), 2, dtype=torch.float64, device=mesh.device)
    for _, micro in pairs:
        assert micro.routes is not None
        for at, layer in enumerate(moe.numbers):
            if layer in micro.routes.loads:
                loads[at] += micro.routes.loads[layer].sum(0)
            if layer in micro.routes.costs:
                costs[at] += micro.routes.costs[layer]
    both = torch.cat((loads, costs), dim=1)
    for name in ("tp", "fsdp", "pp"):
        both = sum_over(both, mesh[name])
    return both[:, :-2], both[:, -2:]


def move_biases(model: StagedModel, loads: Tensor, moe: MoeSpec, rate: float) -> None:
    """Raise the bias of experts with less than the mean load by `rate`, lower that of the others."""
    for module in model.modules():
        if rate and isinstance(module, Router) and moe.bias:
            load = loads[moe.numbers.index(module.layer)]
            module.e_score_correction_bias += rate * torch.sign(load.mean() - load).to(torch.float32)


def balance_metrics(loads: Tensor, costs: Tensor, tokens: int) -> dict[str, float]:
    """Means over layers: the most and the least loaded expert's share of an even one's; and the costs of a token."""
    shares = loads / loads.mean(1, keepdim=True)
    found = {"expert_load_max": fmean(shares.amax(1).tolist()), "expert_load_min": fmean(shares.amin(1).tolist())}
    if costs.any():
        found |= dict(zip(("balance_loss", "router_z_loss"), (costs.mean(0) / tokens).tolist(), strict=True))
    return found


def _mine(micro: MicroBatch, mesh: Mesh) -> Tensor:
    """int64 [t / tp]: which of the micro-batch's tokens are this rank's between blocks."""
    return micro.order.chunk(mesh["tp"].size)[mesh["tp"].rank]
