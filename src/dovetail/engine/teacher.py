"""A teacher's hidden states and head for distillation; a loss without an update."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.engine.base import BatchReport
from dovetail.engine.native import Engine
from dovetail.engine.stage import (
    Sums,
    add_sums,
    batch_report,
    reduce_sums,
    sums_by_name,
    unify_metric_names,
)
from dovetail.engine.validation import ValidatedLoss
from dovetail.errors import ModelError
from dovetail.nn.distillation import ROW, HiddenStates, TeacherStates
from dovetail.nn.heads import LMHead
from dovetail.parallel.collectives import AsyncHostCopy, sum_over
from dovetail.weights.shards import local_params
from dovetail.weights.stream import export_params, gather_whole


@dataclass(frozen=True)
class Teacher:
    """Reads batches for a student's head. weight: its rows for this rank's columns."""

    engine: Engine
    weight: Tensor
    needed: bool
    vocab_size: int  # of the student

    @classmethod
    def of(cls, engine: Engine, student: Engine) -> "Teacher":
        """Layouts may differ; ranks and tokenizer are the same. Collective."""
        model = engine.model
        theirs = model.spec.vocab_size
        ours = student.model.spec.vocab_size
        if theirs < ours:
            sizes = f"the teacher has a vocabulary of {theirs}, the student one of {ours}"
            raise ModelError(f"{sizes}; give a teacher with the student's tokenizer")
        own = model.head if model.cut.last else None
        params = []
        if isinstance(own, LMHead):
            every = local_params(model, engine.mesh)
            params = [param for param in every if param.parameter is own.weight]
        exported = export_params(params, engine.mesh, dtype_of=lambda _: student.dtype)
        ((_, whole),) = gather_whole(exported, engine.mesh, list(exported.specs))
        head = student.model.head if student.model.cut.last else None
        if not isinstance(head, LMHead):
            nothing = whole.new_empty(0, whole.shape[1])
            return cls(engine, nothing, needed=False, vocab_size=ours)
        end = head.first + head.columns
        weight = whole[head.first : end].clone()
        return cls(engine, weight, needed=True, vocab_size=ours)

    def read(self, batch: PackedBatch) -> tuple[PackedBatch, TeacherStates]:
        """The batch with rows of the states. Collective."""
        hidden = hidden_states(self.engine, batch)
        kept = hidden if self.needed else hidden[:0]
        rows = (batch.mask.cumsum(0) - 1).clamp(min=0)
        states = TeacherStates(kept.to(self.weight.dtype), self.weight, self.vocab_size)
        return batch.with_fields(**{ROW: rows}), states


def hidden_states(engine: Engine, batch: PackedBatch) -> Tensor:
    """[n, D] of counted tokens, in order, on every rank. Collective."""
    mesh = engine.mesh
    rows = batch.mask.cumsum(0) - 1
    shape = (int(batch.mask.sum()), engine.model.spec.width)
    out = torch.zeros(shape, dtype=engine.dtype, device=mesh.device)

    def keep(index: Tensor, micro: MicroBatch, x: Tensor) -> None:
        counted = micro.order[micro.index]
        places = index[counted]
        out[rows.to(index.device)[places]] = x

    engine.infer(batch, HiddenStates(), keep)
    out = sum_over(out, mesh["data"])
    return sum_over(out, mesh["pp"])


def evaluate(engine: Engine, batch: PackedBatch, loss: LossFn) -> BatchReport:
    """Collective."""
    sums = Sums()
    mesh = engine.mesh

    def add(_: Tensor, __: MicroBatch, value: Loss) -> None:
        add_sums(sums, value)

    engine.infer(batch, ValidatedLoss(loss), add)
    unify_metric_names(sums, mesh)
    reduced = reduce_sums(sums, mesh)
    rows = AsyncHostCopy(reduced).wait()
    totals = sums_by_name(sorted(sums), rows, mesh)
    return batch_report(totals, len(batch))
