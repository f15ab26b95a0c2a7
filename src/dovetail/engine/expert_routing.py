"""Routing traces, balance losses and bias updates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.micro import LazySequence, MicroBatch
from dovetail.batch.packed import to_device
from dovetail.batch.routing import Balance, Routes, RoutingTrace
from dovetail.nn.model import StagedModel
from dovetail.nn.moe import Router
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.mesh import Mesh

# a replica's micro-batches with their tokens' positions in the batch
PlannedMicroBatches = Sequence[tuple[Tensor, MicroBatch]]


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """Coefficients of `Balance`. bias_rate: step of selection biases (arXiv 2408.15664)."""

    aux_coef: float = 0.0
    z_coef: float = 0.0
    bias_rate: float = 0.0


class Routing:
    def __init__(
        self, model: StagedModel, moe: MoeSpec, mesh: Mesh, settings: BalanceSettings
    ) -> None:
        self.model = model
        self.moe = moe
        self.mesh = mesh
        self.settings = settings

    @classmethod
    def of(
        cls, model: StagedModel, mesh: Mesh, settings: BalanceSettings | None
    ) -> "Routing | None":
        if model.moe is None:
            return None
        return cls(model, model.moe, mesh, settings or BalanceSettings())

    def with_routes(self, micro: MicroBatch) -> MicroBatch:
        if micro.halves:
            halves = tuple(map(self.with_routes, micro.halves))
            return replace(micro, halves=halves)
        trace = micro.batch.routing
        local = None
        if trace is not None:
            rows = micro.rows(self.mesh["tp"])
            local = trace.map(lambda x: x[rows])
        return replace(micro, routes=Routes(local))

    def with_balance(
        self, pairs: PlannedMicroBatches, loss: LossFn, tokens: int, dtype: torch.dtype
    ) -> PlannedMicroBatches:
        """Returns the micro-batches with what their balance losses need. Collective.

        tokens: of the whole batch. dtype: of statistics.
        """
        settings = self.settings
        mesh = self.mesh
        weight = 0.0
        if settings.aux_coef or settings.z_coef:
            with torch.no_grad():
                count = self._expected_count(pairs, loss, dtype)
            weight = count / tokens

        def prepare(number: int) -> tuple[Tensor, MicroBatch]:
            for index, micro in split_halves([pairs[number]]):
                rows = micro.rows(mesh["tp"])
                batch = micro.batch
                lengths = torch.tensor(batch.lengths)
                assert micro.routes is not None
                micro.routes.balance = Balance(
                    counted=rows < len(index),
                    owner=batch.sequence_ids[rows],
                    lengths=to_device(lengths, rows.device),
                    axes=(mesh["tp"], mesh["cp"]),
                    aux_coef=settings.aux_coef,
                    z_coef=settings.z_coef,
                    weight=weight,
                )
            return pairs[number]

        return LazySequence(len(pairs), prepare)

    def update(
        self, totals: Sequence[tuple[Tensor, Tensor]], tokens: int, *, skipped: bool
    ) -> dict[str, float]:
        """Updates the biases and returns metrics. totals: of each batch of the step. tokens: of all."""
        loads = torch.stack([load for load, _ in totals]).sum(0)
        costs = torch.stack([cost for _, cost in totals]).sum(0)
        if not skipped and self.moe.bias and self.settings.bias_rate:
            self._update_biases(loads)
        shares = loads / loads.mean(1, keepdim=True)
        largest = shares.amax(1).tolist()
        smallest = shares.amin(1).tolist()
        metrics = {"expert_load_max": fmean(largest), "expert_load_min": fmean(smallest)}
        if self.settings.aux_coef or self.settings.z_coef:
            means = costs.mean(0) / tokens
            balance_loss, z_loss = means.tolist()
            metrics |= {"balance_loss": balance_loss, "router_z_loss": z_loss}
        return metrics

    def trace(self, pairs: PlannedMicroBatches, tokens: int) -> RoutingTrace:
        moe = self.moe
        device = self.mesh.device
        shape = (tokens, len(moe.numbers), moe.top_k)
        indices = torch.zeros(shape, dtype=torch.int32, device=device)
        for index, micro in split_halves(pairs):
            rows = micro.rows(self.mesh["tp"])
            real = rows < len(index)
            places = index[rows[real]]
            assert micro.routes is not None
            for layer, chosen in micro.routes.chosen.items():
                number = moe.numbers.index(layer)
                indices[places, number] = chosen[real]
        valid = torch.ones(tokens, dtype=torch.bool, device=device)
        return RoutingTrace(moe.numbers, self._sum(indices), valid)

    def totals(self, pairs: PlannedMicroBatches) -> tuple[Tensor, Tensor]:
        """Tokens by layer and expert [M, E], balance losses [M, 2]. Collective."""
        moe = self.moe
        shape = (len(moe.numbers), moe.num_experts + 2)
        both = torch.zeros(shape, dtype=torch.float64, device=self.mesh.device)
        for _, micro in split_halves(pairs):
            assert micro.routes is not None
            for layer, load in micro.routes.loads.items():
                number = moe.numbers.index(layer)
                both[number, :-2] += load.sum(0)
            for layer, cost in micro.routes.costs.items():
                number = moe.numbers.index(layer)
                both[number, -2:] += cost
        both = self._sum(both)
        return both[:, :-2], both[:, -2:]

    def _update_biases(self, loads: Tensor) -> None:
        for module in self.model.modules():
            if isinstance(module, Router):
                number = self.moe.numbers.index(module.layer)
                load = loads[number]
                step = self.settings.bias_rate * torch.sign(load.mean() - load)
                bias = module.e_score_correction_bias
                bias += step.to(bias.dtype)

    def _expected_count(
        self, pairs: PlannedMicroBatches, loss: LossFn, dtype: torch.dtype
    ) -> float:
        device = self.mesh.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for _, micro in pairs:
            counted = micro.all_counted
            blank = torch.zeros(len(counted), dtype=dtype, device=device)
            stats = blank if self.model.is_critic else TokenStats(blank, blank)
            value = loss(stats, counted)
            total += torch.as_tensor(value.count)
        return float(sum_over(total, self.mesh["dp"]))

    def _sum(self, x: Tensor) -> Tensor:
        for axis in ("tp", "data", "pp"):
            x = sum_over(x, self.mesh[axis])
        return x


def split_halves(pairs: PlannedMicroBatches) -> Iterator[tuple[Tensor, MicroBatch]]:
    for index, micro in pairs:
        if micro.halves:
            first, second = micro.halves
            yield index[: micro.first], first
            yield index[micro.first :], second
        else:
            yield index, micro
