"""What the optimizer steps of one training step did, averaged for its row; and what its samples say of themselves."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch
from dovetail.engine.base import Engine, StepReport
from dovetail.errors import NumericsError
from dovetail.rl.experience import Sample, equal_groups

Row = dict[str, Any]


class StepMetrics:
    """The optimizer steps of one training step, averaged for its row."""

    def __init__(self, engine: Engine, loss: LossFn) -> None:
        self.engine, self.loss = engine, loss
        self.reports: list[StepReport] = []

    def run(self, batch: PackedBatch) -> None:
        """One optimizer step."""
        self.reports.append(self.engine.train_step(batch, self.loss))

    def row(self) -> Row:
        """Means of loss, norm and metrics, the last rate, all operations; of no steps nothing."""
        if not self.reports:
            return {}
        columns: dict[str, list[float]] = defaultdict(list)
        for report in self.reports:
            for name, value in {"loss": report.loss, "grad_norm": report.grad_norm, **report.metrics}.items():
                columns[name].append(value)
        row: Row = {name: mean(values) for name, values in columns.items()}
        row |= {"lr": self.reports[-1].lr, "flops": sum(report.flops for report in self.reports)}
        skipped = [report for report in self.reports if report.skipped]
        return {**row, "skipped": True, "fault": skipped[0].describe_faults()} if skipped else row


EMPTY_UPDATE: Mapping[str, Any] = {  # means of nothing are not numbers
    "loss": math.nan, "grad_norm": 0.0, "lr": 0.0, "tokens": 0,
    "entropy_mean": math.nan, "kl_mean": math.nan, "clip_fraction": math.nan,
}  # fmt: skip


def sample_metrics(samples: Seq[Sample], *, compared: bool) -> Row:
    """The means of a step's samples. compared: with each other, so that it matters which share of prompts gets equal rewards."""
    row = {
        "reward_mean": mean([sample.reward for sample in samples]),
        "response_length_mean": mean([float(len(sample.completion.ids)) for sample in samples]),
        "stop_fraction": mean([float(sample.completion.finish == "stop") for sample in samples]),
    }
    return {**row, "equal_groups": mean([*map(float, equal_groups(samples).values())])} if compared else row


def mean(values: Seq[float]) -> float:
    """Rounded once, so that equal values have themselves for a mean, and a reward that all samples get is reached as a target.

    Not a number where there are none: metrics.jsonl says null, and no target is reached.
    """
    return statistics.mean(values) if values else math.nan


class Guard:
    """Looks at every step of one run. Each rank comes to the same conclusion."""

    def __init__(self, max_skipped: int, check_replicas_every: int) -> None:
        self.max_skipped, self.check_replicas_every = max_skipped, check_replicas_every
        self.skipped = 0

    def look(self, row: Mapping[str, Any], trained: Seq[Engine]) -> None:
        """Raise NumericsError after too many skipped steps in a row, MachineError where copies differ. Collective."""
        step = row["step"]
        self.skipped = self.skipped + 1 if row.get("skipped") else 0
        if self.skipped == self.max_skipped:
            raise NumericsError(
                f"step {step}: the updates of {self.skipped} steps in a row were skipped: {row['fault']}; the weights "
                "are those of before; what the ranks computed on lies in run_dir under faults/; mend the data or the "
                "reward, lower optim.lr, or go on from an earlier checkpoint; trainer.max_skipped_steps allows more"
            )
        if self.check_replicas_every and step % self.check_replicas_every == 0:
            for engine in trained:
                engine.check_replicas()
