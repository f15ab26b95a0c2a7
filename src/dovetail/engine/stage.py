"""What this rank's pipeline stages compute for each micro-batch: with gradients, or without. The executor says when.

Without a pipeline there is one stage and the same code. A `ReshardPolicy` says whether parameters stay gathered through a
step, and whether gradients add up where they are until the rank's last backward pass reduces and shards them: one
reduction a step. Where weight gradients may come after that, the reduction waits for `finish`.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dovetail.batch.loss import Loss, LossFn
from dovetail.batch.micro import MicroBatch
from dovetail.engine.fsdp import ReshardPolicy
from dovetail.nn.model import StagedModel
from dovetail.nn.tiling import Tiled
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.schedule import Action

Result = TypeVar("Result")


class _Stages:
    """The stages of one rank: stage number s of the whole model is its s // pp-th."""

    def __init__(self, model: StagedModel, mesh: Mesh, micros: Sequence[MicroBatch], dtype: torch.dtype) -> None:
        self.model, self.mesh, self.micros, self.dtype = model, mesh, micros, dtype

    def buffer(self, micro: int) -> Tensor:
        """Memory for what crosses a boundary: a micro-batch's hidden states, or their gradient, [t, D]."""
        tokens = len(self.micros[micro]) // self.mesh["tp"].size
        return torch.empty(tokens, self.model.spec.width, dtype=self.dtype, device=self.mesh.device)

    def local(self, stage: int) -> int:
        return stage // self.mesh["pp"].size

    def is_last(self, stage: int) -> bool:
        return self.model.cut.last and self.local(stage) == len(self.model.cut.stages) - 1


class Inference(_Stages, Generic[Result]):
    """Forward passes only. On the rank of the last stage `keep` gets each micro-batch's number and result."""

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        micros: Sequence[MicroBatch],
        dtype: torch.dtype,
        keep: Callable[[int, Result], None],
    ) -> None:
        super().__init__(model, mesh, micros, dtype)
        self.keep = keep

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        with torch.no_grad():
            y = self.model(self.micros[micro], None, self.local(stage), x)
        if not self.is_last(stage):
            return y
        self.keep(micro, y)
        return None

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        raise AssertionError(f"{action} in a plan without gradients")

    def weight(self, stage: int, micro: int) -> None:
        raise AssertionError(f"weight gradient of stage {stage} in a plan without gradients")


class Training(_Stages):
    """Forward and backward passes; the losses of the rank of the last stage go to `keep`."""

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        micros: Sequence[MicroBatch],
        dtype: torch.dtype,
        loss: LossFn,
        keep: Callable[[Loss], None],
        residency: ReshardPolicy | None = None,
    ) -> None:
        """residency: default: what the device's memory allows."""
        super().__init__(model, mesh, micros, dtype)
        self.loss, self.keep = loss, keep
        self.residency = residency or ReshardPolicy.of(model, mesh, dtype)
        several = mesh["pp"].size > 1 or len(micros) > 1
        # what is gathered, from one pass to the next
        self.stays = self.residency.gathered and (several or not _spares_memory(model))
        self._stay_gathered(True)
        self.alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # what each stage got and gave
        self.reduced = False

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        if x is not None:
            x.requires_grad_()
        y = self.model(self.micros[micro], self.loss, self.local(stage), x)
        if not self.is_last(stage):
            self.alive[stage, micro] = x, y
            return y
        self.keep(y)
        self.alive[stage, micro] = x, y.total
        return None

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        if self.mesh.layout.schedule == "zero_bubble":  # in any other, no weight gradient ever waits
            for linear in self.model.linears(self.local(action.stage)):
                linear.waits = action.kind == "input"
        self._reduce_next(last and action.kind == "backward")
        x, y = self.alive.pop((action.stage, action.micro))
        y.backward(grad)
        return None if x is None else x.grad

    def weight(self, stage: int, micro: int) -> None:
        for linear in self.model.linears(self.local(stage)):
            for _ in self.micros[micro].apart:
                linear.add_weight_gradient()

    def finish(self) -> None:
        """Reduce the gradients, if no backward pass did: FSDP2 does it at the end of any backward pass of its root."""
        if not self.reduced:
            self._reduce_next(True)
            self.model(None).backward()
        self._stay_gathered(False)

    def _stay_gathered(self, gathered: bool) -> None:
        """Whether forward passes leave parameters gathered. Pipelines and single ranks do as they were wrapped to do."""
        if self.stays and self.mesh["pp"].size == 1 and self.mesh["fsdp"].size > 1:
            assert isinstance(self.model, FSDPModule)
            self.model.set_reshard_after_forward(not gathered)

    def _reduce_next(self, last: bool) -> None:
        """Whether the next backward pass is the one that leaves gradients reduced and parameters sharded."""
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or not self.residency.summed)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not self.stays)
        self.reduced = last


def _spares_memory(model: StagedModel) -> bool:
    """Whether blocks forget between forward and backward what they could keep, because memory ends before time does."""
    return model.recompute != "none" or any(isinstance(part, Tiled) for part in model.modules())
