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
    """Sums of one `forward_backward` over their counts; NaN without a count."""

    loss: float
    count: float  # over all ranks
    tokens: int
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None


@dataclass(frozen=True)
class StepReport:
    """A step over all batches since the last one. Without a count it is `skipped` without `faults`, and its loss is NaN."""

    loss: float  # as metrics a global sum over a global count
    grad_norm: float
    lr: float
    tokens: int  # without padding
    flops: float  # forward and backward, without recomputation
    skipped: bool
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None  # of every token, if asked for
    faults: Mapping[int, Sequence[str]] = field(default_factory=dict)  # what was not finite, by rank

    def describe_faults(self) -> str:
        if self.skipped and not self.faults:
            return "the loss counted nothing"
        return "not finite: " + "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in self.faults.items())


class Engine(Protocol):
    """A sharded model. Results cover all tokens, in order, on every rank.

    A call that raises has no effect, but forward_backward and optim_step then drop all accumulated gradients.
    """

    def score(self, batch: PackedBatch) -> TokenStats:
        """Log-prob and entropy of `batch.targets` [T]; 0 where the mask is False."""

    def score_and_trace(self, batch: PackedBatch) -> tuple[TokenStats, RoutingTrace]: ...

    def values(self, batch: PackedBatch) -> Tensor:
        """The value head's output [T]."""

    def train_step(self, batch: PackedBatch, loss: LossFn) -> StepReport:
        """`zero_grad`, `forward_backward` and `optim_step`. loss: of each micro-batch."""

    def forward_backward(self, batch: PackedBatch, loss: LossFn) -> BatchReport:
        """Add the batch's gradient and count to those before."""

    def optim_step(self, *, denominator: float | None = None) -> StepReport:
        """Divide gradients by `denominator` (default: the losses' counts), clip by the global norm, update, drop them.

        Gradients that are not finite update nothing (`skipped`).
        """

    def zero_grad(self) -> None: ...

    @property
    def param_groups(self) -> Sequence[ParamGroup]:
        """Set lr and weight_decay between steps, alike on every rank. The first has what matches no pattern."""

    def save_state(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> Path:
        """Weights, optimizer, schedule and `extra` (JSON) to a new or empty directory, atomically; no accumulated gradients."""

    def load_state(self, path: Path | str) -> Mapping[str, Any]:
        """Continue from `save_state` or a run's checkpoint, of any layout -> its `extra`."""

    def check_replicas(self) -> None:
        """MachineError on every rank where replicas differ."""

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor), in bounded buckets. dtype: default: the saved ones."""

    def save_pretrained(self, path: Path | str) -> None:
        """An HF directory, atomically."""

    def save_sharded(self, path: Path | str) -> Path:
        """Shards and their manifest, atomically -> their directory."""

    def export_training(self, role: str, *, with_model: bool = False) -> list[Export]:
        """Named by `role`. with_model: also the weights as saved."""

    def load_training(self, role: str, reader: ShardedReader, updates: int) -> None:
        """Continue as after `updates` optimizer steps, from any layout."""

    @property
    def updates(self) -> int: ...

    def offload(self) -> None:
        """All state to the host until `onload`."""

    def onload(self) -> None: ...
