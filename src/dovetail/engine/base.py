"""What an engine does, whatever is behind it.

Every call is collective and takes the same global batch on every rank.
"""

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
    """One optimizer step, the same on every rank. `loss`, and each metric, is its global sum over its global count.

    A step in which nothing is counted on any rank (masks all False, a loss that counts 0) updates nothing, not even by weight
    decay: it is `skipped` without `faults`, and `loss`, a mean of nothing, is not a number.
    `faults`: what was not finite, by rank, where the step was skipped.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int  # tokens that the model computed, padding not counted
    flops: float  # of the model, forward and backward; what is recomputed is not counted
    skipped: bool  # something was not finite, or nothing was counted, so nothing was updated
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None  # of every token, where it was asked for
    faults: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def describe_faults(self) -> str:
        """Why the step was skipped, for a message: what was not finite, and where."""
        if self.skipped and not self.faults:
            return "the loss counted nothing"
        return "not finite: " + "; ".join(f"rank {rank}: {', '.join(found)}" for rank, found in self.faults.items())


class Engine(Protocol):
    """A model cut over ranks. Results cover all tokens of the batch, in its order, on every rank.

    A call that raises leaves nothing of itself behind: after a step that did, the weights are those of before.
    """

    def score(self, batch: PackedBatch) -> TokenStats:
        """Log-prob and entropy of `batch.targets` [T]; 0 where the mask is False."""
        ...

    def score_and_trace(self, batch: PackedBatch) -> tuple[TokenStats, RoutingTrace]:
        """The same, and the experts that every token went to."""
        ...

    def values(self, batch: PackedBatch) -> Tensor:
        """The value head's output at every token [T]."""
        ...

    def train_step(self, batch: PackedBatch, loss: LossFn) -> StepReport:
        """Forward, backward and one optimizer step over the whole batch.

        `loss` is called once or more for each micro-batch, which has some of the batch's sequences in an order of the engine's:
        neighbors in the batch may be in different ones.
        """
        ...

    def check_replicas(self) -> None:
        """Raise MachineError on every rank where ranks hold different bits of what they hold copies of."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every parameter, one bounded bucket resident at a time.

        `dtype`: of all tensors; default: each in the one that it is saved in.
        """
        ...

    def save_pretrained(self, path: Path | str) -> None:
        """Write an HF directory, by all ranks, complete or not at all."""
        ...

    def save_sharded(self, path: Path | str) -> Path:
        """Write each rank's pieces and their manifest, complete or not at all: where they lie."""
        ...

    def export_training(self, role: str, *, with_model: bool = False) -> list[Export]:
        """Everything that training goes on from, for a checkpoint in which this engine plays `role`.

        `with_model`: and the weights as `save_pretrained` would write them.
        """
        ...

    def load_training(self, role: str, reader: ShardedReader, updates: int) -> None:
        """Go on from what another engine exported under `role` after that many optimizer steps, whatever its layout."""
        ...

    @property
    def updates(self) -> int:
        """Optimizer steps that this engine has done."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer state to the host and free the device's memory; nothing else may be called."""
        ...

    def onload(self) -> None:
        """Take them back, bit for bit."""
        ...
