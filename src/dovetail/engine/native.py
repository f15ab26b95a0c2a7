"""Engines compute in modes of their own, whatever those are in which a script calls them: no_grad, inference_mode, autocast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dovetail.arch.registry import ulysses_degree
from dovetail.batch.balancing import balanced_split, plan_microbatches
from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.micro import ContextShard, MicroBatch
from dovetail.batch.packed import PackedBatch, carried, start_reading
from dovetail.batch.routing import RoutingTrace
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.train_state import export_training, load_training
from dovetail.checkpoint.writer import save_sharded
from dovetail.engine.base import StepReport
from dovetail.engine.expert_routing import BalanceSettings, PlannedMicroBatches, Routing
from dovetail.engine.fsdp import ReshardPolicy, begin_gathers, enable_grad_accumulation_fusion, forget_step
from dovetail.engine.microbatches import DualBatch, LazySequence
from dovetail.engine.nonfinite import StepWatch, inputs_of, spoiled
from dovetail.engine.reduction import Sums, add_sums, by_name, mean, name_alike, reduce_sums
from dovetail.engine.stage import Inference, Training
from dovetail.engine.validation import ValidatedBatch, check_same
from dovetail.errors import DataError, ModelError
from dovetail.kernels.reference import wide
from dovetail.memory import OffloadedState
from dovetail.nn.model import StagedModel
from dovetail.optim.optimizer import Optimizer, OptimSettings
from dovetail.optim.replicas import check_replicas
from dovetail.parallel.collectives import AsyncHostCopy, stack_over, sum_over
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.executor import connect, run as execute
from dovetail.pipeline.partition import stage_costs
from dovetail.pipeline.schedule import make_plan
from dovetail.weights.hf_directory import CheckpointSource
from dovetail.weights.save import save
from dovetail.weights.shards import local_tensor, parameters_in, reshard
from dovetail.weights.stream import Export, export, stream

P = ParamSpec("P")


T = TypeVar("T")


class OnMesh(Protocol):
    """Whoever computes on a mesh."""

    mesh: Mesh


E = TypeVar("E", bound=OnMesh)


def in_own_modes(call: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """A call with gradients where it asks for them, and in its engine's dtype.

    What inference mode makes, such as parameters that are gathered in it, can never be trained; autocast computes in a dtype
    that nobody told the engine.
    """

    @wraps(call)
    def run(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(mode=False), torch.autocast(engine.mesh.device.type, enabled=False):
            return call(engine, *args, **kwargs)

    return run


MICROS_A_STAGE = 2  # micro-batches a step for each pipeline rank, where the sequences are enough: bubbles below a third


class NativeEngine:
    """A sharded decoder with its weights loaded. Implements `Engine`; every call is collective."""

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
        """`model` is wrapped (`shard_over_data`) and filled already, `origin` is where it came from.

        `dtype`: of the computation, and so of what pipeline stages send each other; default: the parameters' own.
        `tokens_per_batch`: most tokens that one replica holds in a micro-batch, padding included; None: all in one.
        """
        assert isinstance(model, FSDPModule), "shard_over_data comes first"
        self.model, self.mesh, self.origin = model, mesh, origin
        self.tokens_per_batch = tokens_per_batch
        self.dtype = dtype or next(model.parameters()).dtype
        self.watch = watch or StepWatch()
        self.halving = DualBatch.of(model, mesh, None)
        connect(mesh)
        self._settings, self._routing = optim or OptimSettings(), Routing.of(model, mesh, balance)
        self._optimizer: Optimizer | None = None
        self._residency: ReshardPolicy | None = None
        self._parked: OffloadedState | None = None

    @property
    def optimizer(self) -> Optimizer:
        """Made when first needed, so that an engine that only scores holds no moments."""
        if self._optimizer is None:
            enable_grad_accumulation_fusion(self.model)
            self._optimizer = Optimizer(self.model, self.mesh, self._settings)
        return self._optimizer

    @property
    def residency(self) -> ReshardPolicy:
        """What a training step keeps whole between its micro-batches. The first call is collective."""
        if self._residency is None:
            self._residency = ReshardPolicy.of(self.model, self.mesh, self.dtype)
        return self._residency

    @residency.setter
    def residency(self, residency: ReshardPolicy) -> None:
        self._residency = residency

    @in_own_modes
    def score(self, batch: PackedBatch) -> TokenStats:
        """Log-prob and entropy of `batch.targets` [T]; 0 where the mask is False."""
        self._check_head(critic=False)
        return self._score(batch, self._begun(batch))

    @in_own_modes
    def score_and_trace(self, batch: PackedBatch) -> tuple[TokenStats, RoutingTrace]:
        """The same, and the experts that every token went to, chosen or given."""
        self._check_head(critic=False)
        pairs = self._begun(batch)
        return self._score(batch, pairs), self._trace(batch, pairs)

    def _score(self, batch: PackedBatch, pairs: PlannedMicroBatches) -> TokenStats:
        out = torch.zeros(2, len(batch), dtype=self._wide, device=self.mesh.device)

        def keep(where: Tensor, micro: MicroBatch, stats: TokenStats) -> None:
            out[:, where[micro.order[micro.index]]] = torch.stack(list(stats))

        self._infer(pairs, keep)
        return TokenStats(*self._complete(out, batch))

    @in_own_modes
    def values(self, batch: PackedBatch) -> Tensor:
        """The value head's output at every token [T]."""
        self._check_head(critic=True)
        out = torch.zeros(1, len(batch), dtype=self._wide, device=self.mesh.device)

        def keep(where: Tensor, micro: MicroBatch, values: Tensor) -> None:
            real = micro.order < len(where)  # the rest is padding
            out[0, where[micro.order[real]]] = values[real]

        self._infer(list(self._begun(batch)), keep)  # `keep` waits, and so nothing is made beside it
        return self._complete(out, batch)[0]

    @in_own_modes
    def train_step(self, batch: PackedBatch, loss: LossFn, *, trace: bool = False) -> StepReport:
        """Forward, backward and one optimizer step over the whole batch, whatever its micro-batches.

        trace: the report has the experts that every token went to.
        """
        with self._undone_on_error():
            return self._step(batch, ValidatedBatch(loss), trace=trace)

    def _step(self, batch: PackedBatch, loss: LossFn, *, trace: bool) -> StepReport:
        optimizer, residency, progress = self.optimizer, self.residency, self.watch.progress
        progress.phase("update")
        begin_gathers(self._here, self.mesh)
        sums: Sums = {}
        pairs = self.micro_batches(batch)
        if not pairs:
            raise DataError("train_step got a batch without sequences; skip the step instead")
        if self._routing is not None:
            pairs = self._routing.charged(pairs, loss, len(batch), self._wide)
        micros = _micros_of(pairs)
        optimizer.rule.reserve()  # what activations take of the host is what this leaves
        parts: list[Tensor] = []  # each micro-batch's loss

        def keep(value: Loss) -> None:
            add_sums(sums, value)
            parts.append(value.total.detach())

        stages = Training(self.model, self.mesh, micros, self.dtype, loss, keep, residency)
        layout, costs = self.mesh.layout, stage_costs(self.model.spec, self.mesh.layout)
        execute(make_plan(layout.schedule, layout.pp, layout.virtual_stages, len(micros), costs), stages, self.mesh)
        stages.finish()
        name_alike(sums, self.mesh)
        rows = reduce_sums(sums, self.mesh)
        told = AsyncHostCopy(rows)  # before the update, so that the host need not wait for that
        losses = [*sums[""]] if sums else []  # and what they counted
        everywhere = stack_over(rows[:1, 1].sum(), self.mesh["pp"])[-1]  # the loss's count: its name comes first
        progress.phase("optimizer")  # for the host: a GPU may still be at the last backward passes
        loads = None if self._routing is None else self._routing.totals(pairs)
        update = optimizer.step(everywhere, [*losses, *inputs_of(micros).values()])
        totals = by_name(sorted(sums), told.take(), self.mesh)
        loss_total, count = totals.pop("")
        faults: dict[int, list[str]] = {}
        if update.skipped:
            mine = [*spoiled(batch, pairs, parts, losses), *update.faults]
            faults = self.watch.keep(mine, micros, self.mesh)
        metrics = {name: mean(*sums) for name, sums in totals.items()}
        if self._routing is not None and loads is not None:
            metrics |= self._routing.settle(loads, len(batch), skipped=update.skipped)
        return StepReport(
            loss=mean(loss_total, count),
            grad_norm=update.grad_norm,
            lr=update.lr,
            tokens=len(batch),
            flops=3 * sum(self.model.spec.flops(n) for n in batch.lengths),
            skipped=update.skipped,
            metrics=metrics,
            faults=faults,
            routing=self._trace(batch, pairs) if trace else None,
        )

    def check_replicas(self) -> None:
        """Raise MachineError on every rank where ranks hold different bits of what they hold copies of."""
        check_replicas(self._here, self.mesh, self._optimizer)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor in `dtype`, default: its saved one) of every parameter, a bounded bucket at a time.

        Buffers, such as biases that routers choose by, keep their own dtype.
        """
        dtype_of = self.origin.dtype_of if dtype is None else parameters_in(dtype, self._here)
        return stream(self._here, self.mesh, dtype_of=dtype_of, listed=self.origin.listed)

    def save_pretrained(self, path: Path | str) -> None:
        """Write an HF directory, by all ranks, complete or not at all."""
        origin = self.origin
        save(self._here, path, self.mesh, sides=origin.sides, dtype_of=origin.dtype_of, listed=origin.listed)

    def save_sharded(self, path: Path | str) -> Path:
        """Write each rank's pieces and their manifest into `path`, complete or not at all."""
        origin = self.origin
        return save_sharded(
            self._here, path, self.mesh, sides=origin.sides, dtype_of=origin.dtype_of, listed=origin.listed
        )

    def export_training(self, role: str, *, with_model: bool = False) -> list[Export]:
        """The weights as they are trained and the optimizer's state; `with_model`: the weights as they are saved, too."""
        saved = None
        if with_model:
            saved = export(self._here, self.mesh, dtype_of=self.origin.dtype_of, listed=self.origin.listed)
        state = export_training(self._here, self.mesh, role, self.optimizer.state_tensors(), saved)
        return state if saved is None else [saved, *state]

    def load_training(self, role: str, reader: ShardedReader, updates: int) -> None:
        """Go on from a training checkpoint of any layout, after that many optimizer steps."""
        model = self._here
        self.optimizer.resume(updates)
        load_training(model, self.mesh, role, self.optimizer.state_tensors(), reader)

    @property
    def updates(self) -> int:
        return 0 if self._optimizer is None else self._optimizer.steps

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to the host and free the device's memory until `onload`."""
        assert self._parked is None, "offload() twice without onload()"
        self._parked = OffloadedState(self._resident())

    def onload(self) -> None:
        """Take back what `offload` moved away, bit for bit."""
        assert self._parked is not None, "onload() without offload()"
        self._parked.restore()
        self._parked = None

    @property
    def _here(self) -> StagedModel:
        """The model, for whoever needs its weights: without their memory a read would end the process."""
        if self._parked is not None:
            raise ModelError("this engine stepped aside by offload(), and its weights with it; call onload() first")
        return self.model

    def _resident(self) -> list[Tensor]:
        """Everything that this engine keeps on the device between calls."""
        reshard(self.model)
        found = [local_tensor(param) for param in self.model.parameters()]
        found += [local_tensor(param.grad) for param in self.model.parameters() if param.grad is not None]
        found += list(self.model.buffers())
        if self._optimizer is not None and not self._settings.on_host:
            found += [tensor for tensors in self._optimizer.state_tensors().values() for tensor in tensors.values()]
        return found

    def micro_batches(self, batch: PackedBatch) -> PlannedMicroBatches:
        """This replica's micro-batches, and where in the batch their tokens lie. All replicas have equally many.

        Each is made when it is first asked for, and sent without waiting for the device. Of a batch that lies on the device
        all are made at once: they ask it how many tokens count, and would wait for whatever it has to do by then.
        """
        check_same(batch, self.mesh)
        self.model.check(batch)
        multiple, cp, layout = self.mesh.token_multiple, self.mesh["cp"], self.mesh.layout
        share = ContextShard(cp.rank, cp.size, ulysses_degree(self.model.spec, layout))
        dp, device = self.mesh["dp"], self.mesh.device
        budget = self._budget(batch)
        plan = plan_microbatches(batch.lengths, dp.size, budget, multiple, self.model.spec.width)
        mine, tp = plan[dp.rank], self.mesh["tp"].size
        if batch.media:
            start_reading(batch.media[s] for sequences in mine for s in sequences)

        def make(number: int) -> tuple[Tensor, MicroBatch]:
            chosen = batch.select(mine[number])
            start_reading(chosen.media)  # where there was no room for it before
            everywhere = [[batch.lengths[i] for i in each[number]] for each in plan]
            if self.halving.cuts(everywhere, multiple, budget):
                micro = MicroBatch.halved(chosen, balanced_split(chosen.lengths), multiple, share, tp).to(device)
            else:
                micro = MicroBatch.of(chosen, multiple, share).to(device)
            where = carried(batch.token_index(mine[number]), device)
            return where, micro if self._routing is None else self._routing.note(micro)

        made = LazySequence(len(mine), make)
        return made if batch.tokens.device.type == "cpu" else list(made)

    def _begun(self, batch: PackedBatch) -> PlannedMicroBatches:
        """The micro-batches of a call that only looks at them, while its first parameters are gathered."""
        with self._undone_on_error():
            begin_gathers(self._here, self.mesh)
            pairs = self.micro_batches(batch)
        if not pairs:
            forget_step(self.model, self.mesh)
        return pairs

    def _infer(self, pairs: PlannedMicroBatches, keep: Callable[[Tensor, MicroBatch, Any], None]) -> None:
        """Forward passes over a whole batch; `keep` gets each result where the last stage is."""
        layout = self.mesh.layout
        stages: Inference[Any] = Inference(
            self.model,
            self.mesh,
            _micros_of(pairs),
            self.dtype,
            lambda micro, result: keep(*pairs[micro], result),
        )
        if pairs:
            with self._undone_on_error():
                execute(make_plan("forward", layout.pp, layout.virtual_stages, len(pairs)), stages, self.mesh)
        if layout.pp > 1:
            reshard(self.model)  # what a pipeline keeps gathered between its forward and backward passes

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """What raises within leaves no gradients and nothing gathered, whatever it was, and so no trace in later steps."""
        try:
            yield
        except BaseException:
            forget_step(self.model, self.mesh)
            if self._optimizer is not None:
                self._optimizer.zero_grad()
            raise

    def _check_head(self, *, critic: bool) -> None:
        if self.model.is_critic != critic:
            raise ModelError(
                "this engine has a value head, so it has values(batch) and no log-probs; for score take from_pretrained(..., "
                'head="lm")'
                if self.model.is_critic
                else "this engine has a language model's head, so it has score(batch) and no values; for values take "
                'from_pretrained(..., head="value")'
            )

    def _trace(self, batch: PackedBatch, pairs: PlannedMicroBatches) -> RoutingTrace:
        if self._routing is None:
            raise ModelError(f"this {self.model.spec.family} model has no experts that the native engine routes to")
        return self._routing.trace(pairs, len(batch)).map(lambda x: x.to(batch.tokens.device))

    def _budget(self, batch: PackedBatch) -> int | None:
        """The most tokens of a micro-batch: so few that a pipeline's stages have work for each other, where they can."""
        pp, multiple = self.mesh["pp"].size, self.mesh.token_multiple
        if pp == 1 or not batch.num_sequences:
            return self.tokens_per_batch
        share = -(-len(batch) // (self.mesh["dp"].size * MICROS_A_STAGE * pp))
        enough = max(max(batch.lengths), share) + multiple - 1
        return enough if self.tokens_per_batch is None else min(enough, self.tokens_per_batch)

    def _complete(self, mine: Tensor, batch: PackedBatch) -> Tensor:
        """Everybody's tokens, on every rank and on the batch's device."""
        return sum_over(sum_over(mine, self.mesh["fsdp"]), self.mesh["pp"]).to(batch.tokens.device)

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of statistics and values. Not by the parameters': while they are gathered, it is another."""
        return wide(self.dtype)


def _micros_of(pairs: PlannedMicroBatches) -> LazySequence[MicroBatch]:
    return LazySequence(len(pairs), lambda number: pairs[number][1])
