"""What a step's row says besides the contract's keys: lengths, seconds and rates by phase; and what that costs."""

import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch

from dovetail.data.examples import Prompt
from dovetail.device import peak_memory_gib, usage
from dovetail.launch.progress import Phase, Progress
from dovetail.rl.samples import Sample
from dovetail.rl.step_metrics import length_metrics, sample_metrics
from dovetail.run.loggers import RunFacts
from dovetail.run.metrics import Metrics
from dovetail.run.trainer import phase_metrics
from dovetail.sampler.turn import RolloutId, Turn

STEP_SECONDS, SHARE = 2.0, 0.01  # tracking may take this share of a short step


def samples(count: int) -> list[Sample]:
    finishes: tuple[Literal["stop", "length"], ...] = ("stop", "length", "stop", "stop")
    return [
        Sample(
            Prompt(id=i // 8, ids=tuple(range(3 + i % 5))),
            Turn(RolloutId(0, i // 8, i % 8), tuple(range(1 + i % 7)), (0.0,) * (1 + i % 7), finishes[i % 4]), "", float(i % 3),
        )
        for i in range(count)
    ]  # fmt: skip


def test_lengths_have_percentiles_as_numpy_has_them() -> None:
    row = sample_metrics(samples(64), compared=True)
    made = {
        "prompt_length": [3 + i % 5 for i in range(64)],
        "response_length": [1 + i % 7 for i in range(64)],
    }
    for name, lengths in made.items():
        assert row[f"{name}_mean"] == pytest.approx(np.mean(lengths))
        for percent in (10, 25, 50, 75, 90):
            assert row[f"{name}_p{percent}"] == np.percentile(lengths, percent)
    rewards = [float(i % 3) for i in range(64)]
    quartiles = (row["reward_p25"], row["reward_p75"])
    assert quartiles == tuple(np.percentile(rewards, (25, 75)))
    assert row["truncated_fraction"] == 0.25 and row["stop_fraction"] == 0.75
    assert np.isnan(length_metrics("x", [])["x_p50"])


def test_seconds_of_a_phase_are_counted_once_and_give_rates() -> None:
    progress = Progress()
    progress.take_seconds()
    phases: tuple[Phase, ...] = ("push", "rollout", "update", "optimizer", "rollout")
    for phase in phases:
        progress.phase(phase)
        time.sleep(0.02)
    seconds = progress.take_seconds()
    row = phase_metrics(seconds, {"rollout": (100, 10)})
    assert list(row)[:3] == ["seconds/push", "seconds/rollout", "seconds/update"]
    assert row["seconds/update"] == seconds["update"] + seconds["optimizer"] >= 0.04
    assert (
        row["seconds/rollout"] >= 0.04
        and row["tokens_per_second/rollout"] == 100 / row["seconds/rollout"]
    )
    assert row["samples_per_second/rollout"] * 10 == pytest.approx(row["tokens_per_second/rollout"])
    assert sum(progress.take_seconds().values()) < 0.02, "taken"


def test_tracking_takes_less_than_a_hundredth_of_a_step_of_two_seconds(tmp_path: Path) -> None:
    drawn, progress, metrics = (
        samples(256),
        Progress(tmp_path / "state"),
        Metrics(RunFacts(path=tmp_path, config={}), (), print),
    )
    phases: tuple[Phase, ...] = (
        "push",
        "rollout",
        "reward",
        "wait",
        "score",
        *("update", "optimizer") * 4,
        "wait",
    )
    spent = []
    for step in range(9):
        begun = time.process_time()
        for phase in phases:
            progress.phase(phase)
        work: dict[str, tuple[int, int]] = dict.fromkeys(
            ("rollout", "reward", "score", "update"), (1 << 16, 256)
        )
        row = sample_metrics(drawn, compared=True) | phase_metrics(progress.take_seconds(), work)
        metrics.write({"step": step, **row, **usage(torch.device("cpu"))})
        spent.append(time.process_time() - begun)
    metrics.close()
    assert sorted(spent)[4] < SHARE * STEP_SECONDS


class NVMLError(Exception):
    """As pynvml's."""


@pytest.mark.parametrize(
    "answer",
    [
        37,
        NVMLError("Not Supported"),
        RuntimeError("device 0 is not visible"),
        ModuleNotFoundError("amdsmi"),
    ],
)
def test_columns_of_a_gpu(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch.cuda, whose `utilization` raises what torch 2.13's does without a driver or on a MIG slice."""
    sizes = {
        "memory_allocated": 2 << 30,
        "memory_reserved": 3 << 30,
        "max_memory_allocated": 5 << 30,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, {torch.device("cuda", 1): size}.__getitem__)
    monkeypatch.setattr(torch.cuda, "utilization", mock.Mock(side_effect=[answer]))
    pynvml = ModuleType("pynvml")
    vars(pynvml).update(NVMLError=NVMLError, __spec__=ModuleSpec("pynvml", None))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    device = torch.device("cuda", 1)
    row = usage(device)
    assert row.pop("memory/host_gib") > 0
    columns = {"memory/allocated_gib": 2.0, "memory/reserved_gib": 3.0}
    assert row == columns | ({"gpu_utilization": 37.0} if answer == 37 else {})
    assert peak_memory_gib(device) == 5.0
