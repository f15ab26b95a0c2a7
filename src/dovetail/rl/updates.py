"""What the optimizer steps of one training step did, averaged for its row; and what its samples say of themselves."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from dovetail.batch import LossFn, PackedBatch
from dovetail.engine.base import Engine, StepReport
from dovetail.rl.experience import Sample, equal_groups

Row = dict[str, Any]


class Updates:
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


def describe(samples: Seq[Sample], *, compared: bool) -> Row:
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
