"""What the executor runs on a rank's pipeline stages: forward, backward and weight gradients of micro-batches.

The last backward pass reduces gradients, or `finish`, where deferred weight gradients come later.
"""

from collections.abc import Callable, Sequence

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


class _StageRunner:
    """Stage s of the whole model is the s // pp-th of its rank."""

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        micros: Sequence[MicroBatch],
        dtype: torch.dtype,
        on_result: Callable[..., None],
    ) -> None:
        self.model, self.mesh, self.micros, self.dtype, self.on_result = model, mesh, micros, dtype, on_result

    def buffer(self, micro: int) -> Tensor:
        """Memory for a micro-batch's hidden states, or their gradient, [t, D]."""
        tokens = len(self.micros[micro]) // self.mesh["tp"].size
        return torch.empty(tokens, self.model.spec.width, dtype=self.dtype, device=self.mesh.device)

    def local(self, stage: int) -> int:
        return stage // self.mesh["pp"].size

    def is_last(self, stage: int) -> bool:
        return self.model.cut.last and self.local(stage) == len(self.model.cut.stages) - 1


class InferenceRunner(_StageRunner):
    """The last stage calls `on_result` with each micro-batch's number and result."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        with torch.no_grad():
            y = self.model(self.micros[micro], None, self.local(stage), x)
        if not self.is_last(stage):
            return y
        self.on_result(micro, y)
        return None

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        raise AssertionError(f"{action} in a plan without gradients")

    def weight(self, stage: int, micro: int) -> None:
        raise AssertionError(f"weight gradient of stage {stage} in a plan without gradients")


class TrainingRunner(_StageRunner):
    """The last stage calls `on_loss` with each micro-batch's loss."""

    def __init__(
        self,
        model: StagedModel,
        mesh: Mesh,
        micros: Sequence[MicroBatch],
        dtype: torch.dtype,
        loss: LossFn,
        on_loss: Callable[[Loss], None],
        policy: ReshardPolicy | None = None,
    ) -> None:
        super().__init__(model, mesh, micros, dtype, on_loss)
        self.loss = loss
        self.policy = policy or ReshardPolicy.of(model, mesh, dtype)
        several = mesh["pp"].size > 1 or len(micros) > 1
        spares_memory = model.recompute != "none" or any(isinstance(part, Tiled) for part in model.modules())
        self.stays_gathered = self.policy.gathered and (several or not spares_memory)
        self._gather_between_passes(True)
        self.pending: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output of each stage
        self.reduced = False

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        if x is not None:
            x.requires_grad_()
        y = self.model(self.micros[micro], self.loss, self.local(stage), x)
        if not self.is_last(stage):
            self.pending[stage, micro] = x, y
            return y
        self.on_result(y)
        self.pending[stage, micro] = x, y.total
        return None

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        key = (action.stage, action.micro)
        self.model.wgrad_queue.bucket = key if action.kind == "input" else None
        self._reduce_next(last and action.kind == "backward")
        x, y = self.pending.pop(key)
        y.backward(grad)
        return None if x is None else x.grad

    def weight(self, stage: int, micro: int) -> None:
        self.model.wgrad_queue.flush((stage, micro))

    def finish(self) -> None:
        """Reduce the gradients, if no backward pass did, as FSDP2 does at the end of any backward pass of its root."""
        if not self.reduced:
            self._reduce_next(True)
            self.model(None).backward()
        self._gather_between_passes(False)

    def _gather_between_passes(self, gathered: bool) -> None:
        """Pipelines and single ranks keep their setting."""
        if self.stays_gathered and self.mesh["pp"].size == 1 and self.mesh["fsdp"].size > 1:
            assert isinstance(self.model, FSDPModule)
            self.model.set_reshard_after_forward(not gathered)

    def _reduce_next(self, last: bool) -> None:
        """Whether the next backward pass reduces gradients and reshards."""
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or not self.policy.summed)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not self.stays_gathered)
        self.reduced = last
