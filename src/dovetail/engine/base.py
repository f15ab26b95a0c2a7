"""The interface of an engine. Calls are collective and take the same global batch on every rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import RoutingTrace
from dovetail.checkpoint.reader import ShardedReader
from dovetail.optim.groups import ParamGroup
from dovetail.weights.stream import Export


@dataclass(frozen=True)
class BatchReport:
    """One `forward_backward`. loss, metrics: sums of this batch over its counts; NaN where it counts nothing."""

    loss: float
    count: float  # the loss's, of all ranks
    tokens: int
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, of all batches since the last one.

    A step that counts nothing is `skipped` without `faults`, and its loss is NaN.
    """

    loss: float  # as metrics a global sum over a global count
    grad_norm: float
    lr: float
    tokens: int  # computed by the model, without padding
    flops: float  # of the model, forward and backward, without recomputation
    skipped: bool
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None  # of every token, where `train_step` was asked for it
    faults: Mapping[int, Sequence[str]] = field(default_factory=dict)  # what was not finite, by rank

    def describe_faults(self) -> str:
        if self.skipped and not self.faults:
            return "the loss counted nothing"
        return "not finite: " + "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in self.faults.items())


class Engine(Protocol):
    """A sharded model. Results cover all tokens, in order, on every rank.

    A call that raises has no effect, but for gradients: forward_backward and optim_step then drop all accumulated ones.
    """

    def score(self, batch: PackedBatch) -> TokenStats:
        """Log-prob and entropy of `batch.targets` [T]; 0 where the mask is False."""

    def score_and_trace(self, batch: PackedBatch) -> tuple[TokenStats, RoutingTrace]: ...

    def values(self, batch: PackedBatch) -> Tensor:
        """The value head's output at every token [T]."""

    def train_step(self, batch: PackedBatch, loss: LossFn) -> StepReport:
        """`zero_grad`, `forward_backward` and `optim_step`. `loss` gets each micro-batch, which the engine chooses."""

    def forward_backward(self, batch: PackedBatch, loss: LossFn) -> BatchReport:
        """Add the batch's gradient to those of earlier calls, and its count to theirs."""

    def optim_step(self, *, denominator: float | None = None) -> StepReport:
        """Divide the accumulated gradients, clip them by their global norm, update, and drop them.

        denominator: what summed losses are divided by, the same on every rank; None: the sum of their counts. A step
        whose gradients are not finite updates nothing and says so (`skipped`).
        """

    def zero_grad(self) -> None:
        """Drop the accumulated gradients and counts."""

    @property
    def param_groups(self) -> Sequence[ParamGroup]:
        """Set their lr and weight_decay between steps, alike on every rank. The first has what matches no pattern."""

    def save_state(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> Path:
        """Write weights, optimizer, schedule and `extra` (JSON) to a new or empty directory, complete or not at all.

        Accumulated gradients are not saved. `from_pretrained` loads the weights from it, too.
        """

    def load_state(self, path: Path | str) -> Mapping[str, Any]:
        """Go on from a `save_state`, or a checkpoint of a run, of any layout -> its `extra`."""

    def check_replicas(self) -> None:
        """Raise MachineError on every rank where replicas of a tensor differ."""

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every parameter, in bounded buckets. dtype: default: the saved ones."""

    def save_pretrained(self, path: Path | str) -> None:
        """Write an HF directory, complete or not at all."""

    def save_sharded(self, path: Path | str) -> Path:
        """Write shards and their manifest, complete or not at all -> their directory."""

    def export_training(self, role: str, *, with_model: bool = False) -> list[Export]:
        """All training state, named by `role`. with_model: also the weights as saved."""

    def load_training(self, role: str, reader: ShardedReader, updates: int) -> None:
        """Resume after `updates` optimizer steps, from any layout."""

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""

    def offload(self) -> None:
        """Move all state to the host until `onload`."""

    def onload(self) -> None: ...
