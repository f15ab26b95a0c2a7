"""Metrics of a training step."""

import math
import statistics
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import numpy as np

from dovetail.engine.base import StepReport
from dovetail.rl.samples import Sample, zero_std_groups

Row = dict[str, Any]
Work = Mapping[str, tuple[int, int]]  # tokens and samples by phase

PERCENTILES = (10, 25, 50, 75, 90)
EMPTY_UPDATE: Mapping[str, Any] = {  # None: not measured
    "loss": None, "grad_norm": 0.0, "lr": 0.0, "tokens": 0,
    "entropy_mean": None, "kl_mean": None, "clip_fraction": None,
}  # fmt: skip


def update_metrics(reports: Seq[StepReport]) -> Row:
    """Returns the metrics of optimizer steps."""
    if not reports:
        return {}
    columns = [
        {"loss": report.loss, "grad_norm": report.grad_norm, **report.metrics} for report in reports
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    row: Row = {
        name: mean([column[name] for column in columns if name in column]) for name in names
    }
    row |= {"lr": reports[-1].lr, "flops": sum(report.flops for report in reports)}
    skipped = [report for report in reports if report.skipped]
    return {**row, "skipped": True, "fault": skipped[0].describe_faults()} if skipped else row


def sample_metrics(samples: Seq[Sample], *, compared: bool) -> Row:
    """compared: also the share of groups with equal rewards."""
    rewards = [sample.reward for sample in samples]
    labels = samples[0].rewards if samples else {}
    parts = {
        label: [v for sample in samples if (v := sample.rewards[label]) is not None]
        for label in labels
    }
    row = {
        "reward_mean": mean(rewards),
        "reward_std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward_min": min(rewards, default=math.nan),
        "reward_max": max(rewards, default=math.nan),
        "reward_p25": _percentile(rewards, 25),
        "reward_p75": _percentile(rewards, 75),
        "truncated_fraction": mean(
            [float(sample.completion.finish == "length") for sample in samples]
        ),
        **length_metrics("prompt_length", [len(sample.prompt.ids) for sample in samples]),
        **length_metrics("response_length", [len(sample.completion.ids) for sample in samples]),
        "stop_fraction": mean([float(sample.completion.finish == "stop") for sample in samples]),
        **{f"reward/{label}": mean(values) for label, values in parts.items()},
    }
    return (
        {**row, "equal_groups": mean([*map(float, zero_std_groups(samples).values())])}
        if compared
        else row
    )


def _percentile(values: Seq[float], percent: int) -> float:
    """NaN of none."""
    return float(np.percentile(values, percent)) if values else math.nan


def length_metrics(name: str, lengths: Seq[int]) -> Row:
    values = [float(length) for length in lengths]
    row = {f"{name}_mean": mean(values)}
    return row | {f"{name}_p{percent}": _percentile(values, percent) for percent in PERCENTILES}


def mean(values: Seq[float]) -> float:
    """Exact: equal values are their own mean. NaN of none."""
    return statistics.mean(values) if values else math.nan
