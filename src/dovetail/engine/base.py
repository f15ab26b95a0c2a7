"""The interface of an engine. Calls are collective and take the same global batch on every rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import RoutingTrace
from dovetail.checkpoint.reader import ShardedReader
from dovetail.weights.stream import Export


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. A step that counts nothing is `skipped` without `faults`, and its loss is NaN."""

    loss: float  # as metrics a global sum over a global count
    grad_norm: float
    lr: float
    tokens: int  # computed by the model, without padding
    flops: float  # of the model, forward and backward, without recomputation
    skipped: bool
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None  # of every token, where it was asked for
    faults: Mapping[int, Sequence[str]] = field(default_factory=dict)  # what was not finite, by rank

    def describe_faults(self) -> str:
        if self.skipped and not self.faults:
            return "the loss counted nothing"
        return "not finite: " + "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in self.faults.items())


class Engine(Protocol):
    """A sharded model. Results cover all tokens, in order, on every rank. A call that raises has no effect."""

    def score(self, batch: PackedBatch) -> TokenStats:
        """Log-prob and entropy of `batch.targets` [T]; 0 where the mask is False."""

    def score_and_trace(self, batch: PackedBatch) -> tuple[TokenStats, RoutingTrace]: ...

    def values(self, batch: PackedBatch) -> Tensor:
        """The value head's output at every token [T]."""

    def train_step(self, batch: PackedBatch, loss: LossFn) -> StepReport:
        """Forward, backward and one optimizer step. `loss` gets each micro-batch, which the engine chooses."""

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
