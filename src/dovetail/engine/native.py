"""The parallel engine: a sharded model and its optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dovetail.arch.registry import ulysses_degree
from dovetail.batch.balancing import balanced_split, plan_microbatches, split_units
from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.micro import ContextShard, DualBatch, LazySequence, MicroBatch
from dovetail.batch.packed import PackedBatch, start_reading, to_device
from dovetail.batch.routing import RoutingTrace
from dovetail.engine.base import BatchReport, StepReport
from dovetail.engine.expert_routing import BalanceSettings, PlannedMicroBatches, Routing
from dovetail.engine.fsdp import ReshardPolicy, enable_grad_accumulation_fusion, reset_after_failure
from dovetail.engine.nonfinite import StepWatch, record_faults
from dovetail.engine.stage import (
    Accumulated,
    InferenceRunner,
    TrainingRunner,
    batch_report,
    begin_gathers,
    mean,
    send_failure,
)
from dovetail.engine.state import EngineState
from dovetail.engine.validation import ValidatedLoss, check_same
from dovetail.errors import ConfigError, DataError, ModelError
from dovetail.kernels.reference import wide
from dovetail.memory import OffloadedState
from dovetail.nn.model import StagedModel
from dovetail.optim.groups import freeze
from dovetail.optim.optimizer import Optimizer, OptimSettings
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.executor import connect, is_alone, run as execute
from dovetail.pipeline.partition import stage_costs
from dovetail.pipeline.schedule import make_plan
from dovetail.weights.hf_directory import CheckpointSource
from dovetail.weights.shards import reshard

MICROS_PER_STAGE = 2  # at least: bubbles below 1/3


class Engine(EngineState):
    """A sharded model. Calls are collective, take the same global batch on every rank, and return all tokens in order.

    A call that raises has no effect, but forward_backward and optim_step then drop all accumulated gradients.
    """

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        origin: CheckpointSource,
        *,
        optim: OptimSettings | None = None,
        tokens_per_batch: int | None = None,
        dtype: torch.dtype | None = None,
        balance: BalanceSettings | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """model: of `shard_over_data`. dtype: of the computation. tokens_per_batch: most of a micro-batch, with padding."""
        assert isinstance(model, FSDPModule), "shard_over_data comes first"
        self.model = model
        self.mesh = mesh
        self.origin = origin
        self.tokens_per_batch = tokens_per_batch
        self.dtype = dtype or next(model.parameters()).dtype
        self.watch = watch or StepWatch()
        cp = mesh["cp"]
        self.context_shard = ContextShard(cp.rank, cp.size, ulysses_degree(model.spec, mesh.layout))
        self.dual_batch = DualBatch.of(model.supports_dual_batch, mesh, None)
        connect(mesh)
        self._settings = optim or OptimSettings()
        self._routing = Routing.of(model, mesh, balance)
        self._optimizer: Optimizer | None = None
        self._accumulated: list[Accumulated] = []
        freeze(model, mesh, self._settings.frozen)
        self._offloaded: OffloadedState | None = None

    @property
    def optimizer(self) -> Optimizer:
        if self._optimizer is None:
            enable_grad_accumulation_fusion(self.model)
            self._optimizer = Optimizer(self.model, self.mesh, self._settings)
        return self._optimizer

    @cached_property
    def reshard_policy(self) -> ReshardPolicy:
        """First call: collective."""
        return ReshardPolicy.of(self.model, self.mesh, self.dtype)

    def score(self, batch: PackedBatch) -> TokenStats:
        """Log-prob and entropy of `batch.targets` [T]; 0 where the mask is False."""
        with self._call(critic=False):
            return self._score(batch, self._prepare(batch))

    def score_and_trace(self, batch: PackedBatch) -> tuple[TokenStats, RoutingTrace]:
        with self._call(critic=False):
            pairs = self._prepare(batch)
            return self._score(batch, pairs), self._trace(batch, pairs)

    def _score(self, batch: PackedBatch, pairs: PlannedMicroBatches) -> TokenStats:
        out = torch.zeros(2, len(batch), dtype=self._wide, device=self.mesh.device)

        def keep(index: Tensor, micro: MicroBatch, stats: TokenStats) -> None:
            counted = micro.order[micro.index]
            out[:, index[counted]] = torch.stack(list(stats))

        self._infer(pairs, keep)
        return TokenStats(*self._gather_tokens(out, batch))

    def values(self, batch: PackedBatch) -> Tensor:
        """The value head's output [T]."""

        def keep(index: Tensor, micro: MicroBatch, values: Tensor) -> None:
            real = micro.order < len(index)
            tokens = micro.order[real]
            out[0, index[tokens]] = values[real]

        with self._call(critic=True):
            out = torch.zeros(1, len(batch), dtype=self._wide, device=self.mesh.device)
            self._infer(list(self._prepare(batch)), keep)  # not lazily: `keep` waits
            return self._gather_tokens(out, batch)[0]

    def infer(
        self, batch: PackedBatch, loss: LossFn, keep: Callable[[Tensor, MicroBatch, Any], None]
    ) -> None:
        with self._call(critic=self.model.is_critic):
            self._infer(self._prepare(batch), keep, loss)

    def train_step(self, batch: PackedBatch, loss: LossFn, *, trace: bool = False) -> StepReport:
        """`zero_grad`, `forward_backward` and `optim_step`. loss: of each micro-batch. trace: report every token's experts."""
        self.zero_grad()
        with self._call():
            self._accumulate(batch, ValidatedLoss(loss), trace=trace)
            return self._update(None)

    def forward_backward(
        self, batch: PackedBatch, loss: LossFn, *, trace: bool = False
    ) -> BatchReport:
        """Add the batch's gradient and count to those before; reduced over dp. trace: report every token's experts."""
        with self._call():
            done = self._accumulate(batch, ValidatedLoss(loss), trace=trace)
            totals = done.read(self.mesh)
        return batch_report(totals, len(batch), done.routing)

    def optim_step(self, *, denominator: float | None = None) -> StepReport:
        """Divide gradients by `denominator` (default: the losses' counts), clip by the global norm, update, drop them.

        Gradients that are not finite update nothing (`skipped`).
        """
        if denominator is not None and not 0 < denominator < math.inf:
            raise ConfigError(
                f"denominator={denominator!r}; expected more than 0, or None for the sum of the "
                "counts"
            )
        if not self._accumulated:
            raise ModelError(
                "optim_step() without gradients; call forward_backward(batch, loss) first"
            )
        with self._call():
            return self._update(denominator)

    def zero_grad(self) -> None:
        self._accumulated.clear()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def _accumulate(self, batch: PackedBatch, loss: LossFn, *, trace: bool) -> Accumulated:
        optimizer = self.optimizer
        policy = self.reshard_policy
        progress = self.watch.progress
        if progress is not None:
            progress.phase("update")
        begin_gathers(self.resident_model, self.mesh)
        pairs = self.micro_batches(batch)
        if not pairs:
            raise DataError("the batch to train on has no sequences; skip the step instead")
        if self._routing is not None:
            pairs = self._routing.with_balance(pairs, loss, len(batch), self._wide)
        optimizer.reserve()  # before activations take host memory
        watch = None if progress is None or progress.listener is None else progress.advance
        stages = TrainingRunner(
            self.model, self.mesh, _micros_of(pairs), self.dtype, loss, policy, watch
        )
        if progress is not None:
            stages.mark = progress.mark
        try:
            self._run(self.mesh.layout.schedule, stages)
        except Exception:
            if self.mesh["pp"].size > 1 and is_alone(self.mesh):
                send_failure(self.mesh)
            raise
        stages.finish()
        done = Accumulated(stages, batch, pairs)
        done.loads = None if self._routing is None else self._routing.totals(pairs)
        done.routing = self._trace(batch, pairs) if trace else None
        self._accumulated.append(done)
        return done

    def _update(self, denominator: float | None) -> StepReport:
        done = self._accumulated
        if self.watch.progress is not None:
            self.watch.progress.phase("optimizer")
        count: Tensor | float
        if denominator is None:
            count = torch.stack([each.count for each in done]).sum()
        else:
            count = denominator
        watched = [x for each in done for x in each.watched]
        update = self.optimizer.step(count, watched)
        totals: dict[str, tuple[float, float]] = {}
        for each in done:
            found = each.read(self.mesh)
            for name, (total, number) in found.items():
                total_before, number_before = totals.get(name, (0.0, 0.0))
                totals[name] = (total_before + total, number_before + number)
        loss_total, number = totals.pop("")
        faults = record_faults(done, update.faults, self.watch, self.mesh) if update.skipped else {}
        metrics = {name: mean(*pair) for name, pair in totals.items()}
        tokens = sum(len(each.batch) for each in done)
        lengths = [n for each in done for n in each.batch.lengths]
        forward_flops = sum(map(self.model.spec.flops, lengths))
        if self._routing is not None:
            loads = [each.loads for each in done if each.loads is not None]
            metrics |= self._routing.update(loads, tokens, skipped=update.skipped)
        report = StepReport(
            loss=mean(loss_total, number if denominator is None else denominator),
            grad_norm=update.grad_norm,
            lr=update.lr,
            tokens=tokens,
            flops=3 * forward_flops,
            skipped=update.skipped,
            metrics=metrics,
            faults=faults,
            routing=done[0].routing if len(done) == 1 else None,
        )
        done.clear()
        return report

    @property
    def resident_model(self) -> StagedModel:
        """Reading offloaded storage would crash."""
        if self._offloaded is not None:
            raise ModelError("this engine was moved to the host by offload(); call onload() first")
        return self.model

    def micro_batches(self, batch: PackedBatch) -> PlannedMicroBatches:
        """Lazy, unless the batch is on the device: each waits for it."""
        check_same(batch, self.mesh)
        self.model.check(batch)
        multiple = self.mesh.token_multiple
        share = self.context_shard
        dp = self.mesh["dp"]
        device = self.mesh.device
        tp = self.mesh["tp"].size
        budget = self._budget(batch)
        plan = plan_microbatches(
            batch.lengths, dp.size, budget, multiple, self.model.spec.width, batch.groups
        )
        own = plan[dp.rank]
        if batch.media:
            start_reading(batch.media[s] for sequences in own for s in sequences)

        def make(number: int) -> tuple[Tensor, MicroBatch]:
            chosen = batch.select(own[number])
            start_reading(chosen.media)
            lengths = [[batch.lengths[i] for i in replica[number]] for replica in plan]
            if self.dual_batch.should_split(lengths, multiple, budget):
                cut = balanced_split(chosen.lengths)
                micro = MicroBatch.halved(chosen, cut, multiple, share, tp)
            else:
                micro = MicroBatch.of(chosen, multiple, share)
            micro = micro.to(device)
            index = batch.token_index(own[number])
            if self._routing is not None:
                micro = self._routing.with_routes(micro)
            return to_device(index, device), micro

        pairs = LazySequence(len(own), make)
        return pairs if batch.tokens.device.type == "cpu" else list(pairs)

    def _prepare(self, batch: PackedBatch) -> PlannedMicroBatches:
        begin_gathers(self.resident_model, self.mesh)
        pairs = self.micro_batches(batch)
        if not pairs:
            reset_after_failure(self.model, self.mesh)
        return pairs

    def _infer(
        self,
        pairs: PlannedMicroBatches,
        keep: Callable[[Tensor, MicroBatch, Any], None],
        loss: LossFn | None = None,
    ) -> None:
        def on_result(micro: int, result: Any) -> None:
            keep(*pairs[micro], result)

        if pairs:
            stages = InferenceRunner(
                self.model, self.mesh, _micros_of(pairs), self.dtype, on_result, loss
            )
            self._run("forward", stages)
        if self.mesh["pp"].size > 1:
            reshard(self.model)  # a pipeline keeps them gathered

    def _run(self, schedule: str, stages: InferenceRunner | TrainingRunner) -> None:
        layout = self.mesh.layout
        if layout.pp == 1:
            stages.run()
            return
        costs = stage_costs(self.model.spec, layout)
        plan = make_plan(schedule, layout.pp, layout.virtual_stages, len(stages.micros), costs)
        execute(plan, stages, self.mesh)

    @contextmanager
    def _call(self, *, critic: bool | None = None) -> Iterator[None]:
        """Without the caller's inference mode and autocast; an error drops the step. critic: the head that it needs."""
        if critic is not None and self.model.is_critic != critic:
            has = "a language model's head, so it has score(batch) and no values"
            other = "value"
            if self.model.is_critic:
                has = "a value head, so it has values(batch) and no log-probs"
                other = "lm"
            raise ModelError(
                f"this engine has {has}; for these take from_pretrained(..., head={other!r})"
            )
        autocast = torch.autocast(self.mesh.device.type, enabled=False)
        with torch.inference_mode(mode=False), autocast:
            try:
                yield
            except BaseException:
                reset_after_failure(self.model, self.mesh)
                if critic is None:  # a part may have been added
                    self.zero_grad()
                raise

    def _trace(self, batch: PackedBatch, pairs: PlannedMicroBatches) -> RoutingTrace:
        if self._routing is None:
            raise ModelError(
                f"this {self.model.spec.family} model has no experts that the native engine "
                "routes to"
            )
        trace = self._routing.trace(pairs, len(batch))
        device = batch.tokens.device
        return trace.map(lambda x: x.to(device))

    def _budget(self, batch: PackedBatch) -> int | None:
        pp = self.mesh["pp"].size
        multiple = self.mesh.token_multiple
        if pp == 1 or not batch.num_sequences:
            return self.tokens_per_batch
        micros = self.mesh["dp"].size * MICROS_PER_STAGE * pp
        share = -(-len(batch) // micros)
        units = split_units(batch.num_sequences, batch.groups)
        longest = max(sum(batch.lengths[s] for s in unit) for unit in units)
        enough = max(longest, share) + multiple - 1
        return enough if self.tokens_per_batch is None else min(enough, self.tokens_per_batch)

    def _gather_tokens(self, x: Tensor, batch: PackedBatch) -> Tensor:
        x = sum_over(x, self.mesh["data"])
        x = sum_over(x, self.mesh["pp"])
        return x.to(batch.tokens.device)

    @property
    def _wide(self) -> torch.dtype:
        return wide(self.dtype)


def _micros_of(pairs: PlannedMicroBatches) -> LazySequence[MicroBatch]:
    return LazySequence(len(pairs), lambda number: pairs[number][1])
