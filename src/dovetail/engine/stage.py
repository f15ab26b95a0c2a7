"""Forward, backward and weight gradients on a rank's pipeline stages."""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dovetail.batch.loss import Loss, LossFn
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import RoutingTrace
from dovetail.engine.base import BatchReport
from dovetail.engine.fsdp import ReshardPolicy
from dovetail.errors import SecondaryFailure
from dovetail.nn.model import StagedModel
from dovetail.nn.tiling import Tiled
from dovetail.parallel.collectives import (
    AsyncHostCopy,
    gather_objects,
    stack_numbers,
    stack_over,
    sum_over,
)
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.schedule import Action

FAILED = -1  # instead of a checksum
Sums = dict[str, tuple[Tensor, Tensor]]  # totals and counts; "": the loss


class InferenceRunner:
    """This rank's stages; the last one of the model calls `on_result` with number and result."""

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        micros: Sequence[MicroBatch],
        dtype: torch.dtype,
        on_result: Callable[..., None],
        loss: LossFn | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.micros = micros
        self.dtype = dtype
        self.on_result = on_result
        self.loss = loss

    def buffer(self, micro: int) -> Tensor:
        tokens = len(self.micros[micro]) // self.mesh["tp"].size
        return torch.empty(tokens, self.model.spec.width, dtype=self.dtype, device=self.mesh.device)

    def local(self, stage: int) -> int:
        return stage // self.mesh["pp"].size

    def is_last(self, stage: int) -> bool:
        return self.model.cut.last and self.local(stage) == len(self.model.cut.stages) - 1

    def run(self) -> None:
        for micro in range(len(self.micros)):
            self.forward(0, micro, None)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        with torch.no_grad():
            y = self.model(self.micros[micro], self.loss, self.local(stage), x)
        if not self.is_last(stage):
            return y
        self.on_result(micro, y)
        return None


class TrainingRunner(InferenceRunner):
    """sums, losses: on the last stage."""

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        micros: Sequence[MicroBatch],
        dtype: torch.dtype,
        loss: LossFn,
        policy: ReshardPolicy | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        """watch: gets the backward passes done, and all."""
        sums: Sums = {}
        losses: list[Tensor] = []

        def add(_: int, value: Loss) -> None:  # a method would keep this runner alive
            add_sums(sums, value)
            losses.append(value.total.detach())

        super().__init__(model, mesh, micros, dtype, add, loss)
        self.sums = sums
        self.losses = losses
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext  # for a profile
        self.policy = policy or ReshardPolicy.of(model, mesh, dtype)
        several = mesh["pp"].size > 1 or len(micros) > 1
        is_tiled = any(isinstance(part, Tiled) for part in model.modules())
        spares_memory = model.recompute != "none" or is_tiled
        self.stays_gathered = self.policy.gathered and (several or not spares_memory)
        self._gather_between_passes(True)
        self.pending: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.reduced = False
        self.watch = watch
        self.done = 0

    def run(self) -> None:
        last = len(self.micros) - 1
        for micro in range(len(self.micros)):
            self.forward(0, micro, None)
            action = Action("backward", 0, micro)
            self.backward(action, None, last=micro == last)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        if x is not None:
            x.requires_grad_()
        with self.mark("forward"):
            y = self.model(self.micros[micro], self.loss, self.local(stage), x)
        if not self.is_last(stage):
            self.pending[stage, micro] = x, y
            return y
        self.on_result(micro, y)
        self.pending[stage, micro] = x, y.total
        return None

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        key = (action.stage, action.micro)
        self.model.wgrad_queue.bucket = key if action.kind == "input" else None
        self._reduce_next(last and action.kind == "backward")
        x, y = self.pending.pop(key)
        if y.requires_grad:
            with self.mark("backward"):
                y.backward(grad)
        else:
            self.reduced = False
        self.done += 1
        if self.watch is not None:
            passes = len(self.micros) * len(self.model.cut.stages)
            self.watch(self.done, passes)
        return None if x is None else x.grad

    def weight(self, stage: int, micro: int) -> None:
        with self.mark("backward"):
            self.model.wgrad_queue.flush((stage, micro))

    def finish(self) -> None:
        """Reduce, if no backward did: FSDP2 does at the end of its root's."""
        if not self.reduced:
            self._reduce_next(True)
            self.model(None).backward()
        self._gather_between_passes(False)

    def _gather_between_passes(self, gathered: bool) -> None:
        if self.stays_gathered and self.mesh["pp"].size == 1 and self.mesh["fsdp"].size > 1:
            assert isinstance(self.model, FSDPModule)
            self.model.set_reshard_after_forward(not gathered)

    def _reduce_next(self, last: bool) -> None:
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or not self.policy.summed)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not self.stays_gathered)
        self.reduced = last


class Accumulated:
    """Results of a `forward_backward` for the optimizer step. count: float64 [], on the device. Made collectively."""

    def __init__(
        self, stages: TrainingRunner, batch: PackedBatch, pairs: Sequence[tuple[Tensor, MicroBatch]]
    ) -> None:
        sums = stages.sums
        mesh = stages.mesh
        unify_metric_names(sums, mesh)
        rows = reduce_sums(sums, mesh)
        self.rows = AsyncHostCopy(rows)
        self.names = sorted(sums)  # copied before the update, without a wait
        count = rows[:1, 1].sum()  # "" sorts first
        self.count = stack_over(count, mesh["pp"])[-1]
        self.batch = batch
        self.losses = stages.losses
        self.own = [*sums[""]] if sums else []
        self.pairs = []
        for index, micro in pairs:
            kept = replace(micro, routes=None, halves=())
            self.pairs.append((index, kept))
        self.totals: dict[str, tuple[float, float]] = {}
        self.loads: tuple[Tensor, Tensor] | None = None
        self.routing: RoutingTrace | None = None

    @property
    def watched(self) -> list[Tensor]:
        inputs = inputs_of([micro for _, micro in self.pairs])
        return [*self.own, *inputs.values()]

    def read(self, mesh: Mesh) -> dict[str, tuple[float, float]]:
        """Totals and counts; "": the loss. The host waits. Collective."""
        self.totals = self.totals or sums_by_name(self.names, self.rows.wait(), mesh)
        return self.totals


def begin_gathers(model: StagedModel, mesh: Mesh) -> None:
    """Prefetch what a forward pass needs first. Collective."""
    for module in (model, *model.first_groups()):
        if isinstance(module, FSDPModule):
            module.unshard(async_op=mesh["fsdp"].size > 1)


def add_sums(sums: Sums, value: Loss) -> None:
    pairs = {"": (value.total, value.count), **value.metrics}
    for name, (total, count) in pairs.items():
        total = total.detach()
        count = torch.as_tensor(count, device=total.device)
        count = count.detach()
        if name in sums:
            total_before, count_before = sums[name]
            total = total_before + total
            count = count_before + count
        sums[name] = (total, count)


def send_failure(mesh: Mesh) -> None:
    """Answers the other stages' `unify_metric_names` after an error on this rank. Collective."""
    stack_numbers([FAILED], mesh["world"], mesh.device)


def unify_metric_names(sums: Sums, mesh: Mesh) -> None:
    """Adds zeros for other ranks' metrics. SecondaryFailure where another failed. Collective."""
    names = sorted(sums)
    world = mesh["world"]
    checksum = zlib.crc32(json.dumps(names).encode()) if sums else 0
    hashes = stack_numbers([checksum], world, mesh.device)
    if [FAILED] in hashes:
        stage = hashes.index([FAILED])
        raise SecondaryFailure(f"pipeline stage {stage} failed in this pass; its rank says why")
    different = {value for (value,) in hashes if value}  # 0: stages without a loss
    if len(different) > 1:
        by_rank = gather_objects(names, world, mesh.device)
        zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
        if sums:
            for name in chain.from_iterable(by_rank):
                sums.setdefault(name, (zero, zero))


def reduce_sums(sums: Sums, mesh: Mesh) -> Tensor:
    """float64 [n, 2] on the last stage, [0, 2] elsewhere."""
    pp = mesh["pp"]
    if pp.rank < pp.size - 1:
        return torch.zeros(0, 2, dtype=torch.float64, device=mesh.device)
    rows = []
    for name in sorted(sums):
        total, count = sums[name]
        row = [total.to(torch.float64), count.to(torch.float64)]
        rows.append(torch.stack(row))
    return sum_over(torch.stack(rows), mesh["data"])


def sums_by_name(
    names: list[str], rows: list[list[float]], mesh: Mesh
) -> dict[str, tuple[float, float]]:
    by_name = dict(zip(names, rows, strict=True))
    by_stage = gather_objects(by_name, mesh["pp"], mesh.device)
    return {name: (total, count) for name, (total, count) in by_stage[-1].items()}


def batch_report(
    totals: Mapping[str, tuple[float, float]], tokens: int, routing: RoutingTrace | None = None
) -> BatchReport:
    """Returns sums over their counts. totals: of `sums_by_name`."""
    means = {name: mean(*pair) for name, pair in totals.items()}
    loss = means.pop("")
    _, count = totals[""]
    return BatchReport(loss, count, tokens, means, routing)


def mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def inputs_of(micros: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Floating-point fields of counted tokens."""
    found = {}
    for i, micro in enumerate(micros):
        fields = micro.counted.fields
        for name, x in fields.items():
            if x.is_floating_point():
                found[f"{name} of micro-batch {i}"] = x
    return found
