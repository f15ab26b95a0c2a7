"""What an engine does about experts: traces in and out, the cost of uneven loads, and biases that even them out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import carried
from dovetail.batch.routing import Balance, Routes, RoutingTrace
from dovetail.engine.microbatches import LazySequence
from dovetail.nn.model import StagedModel
from dovetail.nn.moe import Router
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.mesh import Mesh

PlannedMicroBatches = Sequence[
    tuple[Tensor, MicroBatch]
]  # this replica's micro-batches, and where in the batch their tokens lie


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """How training evens out what experts get. The coefficients are those of `routing.Balance`; bias_rate: by how much a step
    moves the bias of an expert with too few or too many tokens (arXiv 2408.15664), where the family has such biases."""

    aux_coef: float = 0.0
    z_coef: float = 0.0
    bias_rate: float = 0.0


class Routing:
    """The experts of one engine's model, whichever of its layers are here."""

    def __init__(self, model: StagedModel, moe: MoeSpec, mesh: Mesh, settings: BalanceSettings) -> None:
        self.model, self.moe, self.mesh, self.settings = model, moe, mesh, settings

    @classmethod
    def of(cls, model: StagedModel, mesh: Mesh, settings: BalanceSettings | None) -> "Routing | None":
        """None for a model without experts of ours."""
        return None if model.moe is None else cls(model, model.moe, mesh, settings or BalanceSettings())

    def note(self, micro: MicroBatch) -> MicroBatch:
        """`micro`, or its halves, ready to note routes, taking those that its batch brings along."""
        if micro.halves:
            return replace(micro, halves=tuple(map(self.note, micro.halves)))
        trace, rows = micro.batch.routing, self._mine(micro)
        return replace(micro, routes=Routes(None if trace is None else trace.map(lambda x: x[rows])))

    def charged(self, pairs: PlannedMicroBatches, loss: LossFn, tokens: int, dtype: torch.dtype) -> PlannedMicroBatches:
        """The micro-batches of a step of so many tokens, which note their loads and pay for uneven ones. Collective.

        Each is charged when it is asked for; a cost needs the count of all, and so all at once. dtype: of a loss's statistics.
        """
        settings, weight = self.settings, 0.0
        if settings.aux_coef or settings.z_coef:
            with torch.no_grad():
                weight = self._expected_count(pairs, loss, dtype) / tokens

        def charge(number: int) -> tuple[Tensor, MicroBatch]:
            for where, micro in apart([pairs[number]]):
                self._charge(where, micro, weight)
            return pairs[number]

        return LazySequence(len(pairs), charge)

    def _charge(self, where: Tensor, micro: MicroBatch, weight: float) -> None:
        rows, batch, settings = self._mine(micro), micro.batch, self.settings
        assert micro.routes is not None
        micro.routes.balance = Balance(
            counted=rows < len(where),
            owner=batch.sequence_ids[rows],
            lengths=carried(torch.tensor(batch.lengths), rows.device),
            axes=(self.mesh["tp"], self.mesh["cp"]),
            aux_coef=settings.aux_coef,
            z_coef=settings.z_coef,
            weight=weight,
        )

    def settle(self, totals: tuple[Tensor, Tensor], tokens: int, *, skipped: bool) -> dict[str, float]:
        """After a step, with its `totals`: move biases, unless it was skipped, and tell how even the loads were.

        Means over layers: the most and the least loaded expert's share of an even load, and the costs of a token.
        """
        loads, costs = totals
        if not skipped and self.moe.bias and self.settings.bias_rate:
            self._move_biases(loads)
        shares = loads / loads.mean(1, keepdim=True)
        found = {"expert_load_max": fmean(shares.amax(1).tolist()), "expert_load_min": fmean(shares.amin(1).tolist())}
        if self.settings.aux_coef or self.settings.z_coef:
            found |= dict(zip(("balance_loss", "router_z_loss"), (costs.mean(0) / tokens).tolist(), strict=True))
        return found

    def trace(self, pairs: PlannedMicroBatches, tokens: int) -> RoutingTrace:
        """The routes of all tokens of a batch, on every rank. Collective."""
        moe, device = self.moe, self.mesh.device
        indices = torch.zeros(tokens, len(moe.numbers), moe.top_k, dtype=torch.int32, device=device)
        for where, micro in apart(pairs):
            rows = self._mine(micro)
            real = rows < len(where)
            assert micro.routes is not None
            for layer, chosen in micro.routes.chosen.items():
                indices[where[rows[real]], moe.numbers.index(layer)] = chosen[real]
        return RoutingTrace(moe.numbers, self._summed(indices), torch.ones(tokens, dtype=torch.bool, device=device))

    def totals(self, pairs: PlannedMicroBatches) -> tuple[Tensor, Tensor]:
        """How many tokens each expert of each routing layer had, [M, E], and the sums of both costs, [M, 2]. Collective; the
        host waits for nothing, so it may ask while backward passes run."""
        both = torch.zeros(
            len(self.moe.numbers), self.moe.num_experts + 2, dtype=torch.float64, device=self.mesh.device
        )
        for _, micro in apart(pairs):
            assert micro.routes is not None
            for layer, load in micro.routes.loads.items():
                both[self.moe.numbers.index(layer), :-2] += load.sum(0)
            for layer, cost in micro.routes.costs.items():
                both[self.moe.numbers.index(layer), -2:] += cost
        both = self._summed(both)
        return both[:, :-2], both[:, -2:]

    def _move_biases(self, loads: Tensor) -> None:
        """Raise the bias of experts with less than the mean load, lower that of the others."""
        for module in self.model.modules():
            if isinstance(module, Router):
                load = loads[self.moe.numbers.index(module.layer)]
                step = self.settings.bias_rate * torch.sign(load.mean() - load)
                module.e_score_correction_bias += step.to(module.e_score_correction_bias.dtype)

    def _expected_count(self, pairs: PlannedMicroBatches, loss: LossFn, dtype: torch.dtype) -> float:
        """What `loss` will count over all micro-batches: its count is a matter of its tokens, not of what they cost."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for _, micro in pairs:
            blank = torch.zeros(len(micro.all_counted), dtype=dtype, device=self.mesh.device)
            stats = blank if self.model.is_critic else TokenStats(blank, blank)
            total += torch.as_tensor(loss(stats, micro.all_counted).count)
        return float(sum_over(total, self.mesh["dp"]))

    def _mine(self, micro: MicroBatch) -> Tensor:
        """int64 [t]: which of the micro-batch's tokens are this rank's between blocks."""
        return micro.order.chunk(self.mesh["tp"].size)[self.mesh["tp"].rank]

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over all ranks, each of which has tokens, or layers, of its own."""
        return sum_over(sum_over(sum_over(x, self.mesh["tp"]), self.mesh["fsdp"]), self.mesh["pp"])


def apart(pairs: PlannedMicroBatches) -> Iterator[tuple[Tensor, MicroBatch]]:
    """What blocks compute: the halves of micro-batches that have some, each with where in the batch its tokens lie."""
    for where, micro in pairs:
        if micro.halves:
            yield from zip((where[: micro.first], where[micro.first :]), micro.halves, strict=True)
        else:
            yield where, micro
