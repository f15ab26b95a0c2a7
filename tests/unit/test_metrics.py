"""Metrics reach the disk row by row, and no logger stops a run."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.jsonl import append
from dovetail.recipe.tracking import LoggerSection
from dovetail.run.loggers import RunFacts, check_loggers, grouped
from dovetail.run.metrics import Metrics, missing_rows, read_rows


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_on_disk_at_once_and_old_rows_stay(tmp_path: Path) -> None:
    for step in (1, 2):
        metrics = Metrics(RunFacts(path=tmp_path, config={}), (), say=pytest.fail)
        metrics.write({"step": step, "loss": 0.5, "skipped": True})
        assert read(tmp_path / "metrics.jsonl")[-1] == {"step": step, "loss": 0.5, "skipped": True}
        metrics.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    metrics = Metrics(RunFacts(path=tmp_path, config={}), (), say=pytest.fail)
    metrics.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "fault": "\ud800"})
    metrics.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "grad_norm": None, "fault": "\ud800"}
    ]


def test_a_row_behind_a_cut_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    """A kill, or a full disk, may have left the beginning of the last one."""
    path = tmp_path / "events.jsonl"
    for step in (1, 2, 3):
        append(path, {"step": step})
        if step == 2:
            path.write_bytes(path.read_bytes()[:-4])
    assert path.read_text() == '{"step": 1}\n{"step":\n{"step": 3}\n'


def metrics_row(step: object) -> str:
    return json.dumps({"step": step, "loss": None, "tokens": 3, "step_seconds": 0.5}) + "\n"


@pytest.mark.parametrize(
    "damage",
    [
        "\ufffd\0{",
        "[" * 100_000,
        "{}",
        "[]",
        '{"step": 3, "loss": 1}',
        metrics_row("3"),
        metrics_row(1),
    ],
    ids=["garbage", "nested", "empty", "list", "torn", "text", "repeated"],
)
def test_a_damaged_line_costs_its_own_row_only(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [metrics_row(step) for step in range(1, 8)]
    lines[2] = damage.rstrip("\n") + "\n"
    path.write_text("".join(lines))
    rows, kept, rest = read_rows(path, 6)
    assert [row["step"] for row in rows] == [1, 2, 4, 5, 6]
    assert kept == lines[:2] + lines[3:6], "to the letter"
    assert rest == [lines[2], lines[6]]
    told = missing_rows(rows, 6)
    assert "has no row of step 3; the rows of steps 1 to 2, 4 to 6 are kept" in told


def test_a_whole_file_has_no_missing_rows_and_a_lost_one_has_none_that_are_kept(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path, 9) == ([], [], [])
    assert (
        missing_rows([], 9) == "was lost or damaged: it has no row of steps 1 to 9; no row is kept"
    )
    path.write_text("".join(map(metrics_row, range(1, 4))))
    rows, _, _ = read_rows(path, 3)
    assert missing_rows(rows, 3) == ""
    every_second = [{"step": step} for step in range(2, 100, 2)]
    assert "no row of steps 1, 3, 5, 7, 45 more; " in missing_rows(every_second, 98)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failing_logger_is_dropped_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> object:
        raise ConnectionError("no network for sesame-1234")

    monkeypatch.setenv("WANDB_API_KEY", "sesame-1234")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    said: list[str] = []
    metrics = Metrics(
        RunFacts(path=tmp_path, config={}), (LoggerSection(name="wandb"),), said.append
    )
    assert len(said) == 1, "before the first step"
    metrics.write({"step": 1})
    metrics.write({"step": 2})
    metrics.close()
    assert said == [
        "the logger wandb failed and gets no more; the run goes on (ConnectionError: no network for ***)"
    ]
    assert read(tmp_path / "metrics.jsonl")[-1] == {"step": 2}


def test_loggers_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ConfigError,
        match=r"trainer.loggers has wandb, which is not installed: pip install 'dovetail-rl\[w",
    ):
        check_loggers((LoggerSection(name="wandb"),))


def test_trackers_get_numbers_in_groups() -> None:
    names = {
        "loss": "train/loss", "grad_norm": "train/grad_norm", "entropy_mean": "train/entropy_mean", "kl_mean": "train/kl_mean",
        "critic_loss": "critic/loss", "reward_mean": "reward/mean", "reward/math": "reward/math",
        "equal_groups": "reward/equal_groups", "response_length_p90": "response_length/p90",
        "prompt_length_mean": "prompt_length/mean", "truncated_fraction": "response_length/truncated_fraction",
        "seconds/rollout": "time/rollout", "step_seconds": "time/step", "tokens": "perf/tokens",
        "tokens_per_second": "perf/tokens_per_second", "tokens_per_second/update": "perf/tokens_per_second/update",
        "samples_per_second/reward": "perf/samples_per_second/reward", "mfu": "perf/mfu",
        "peak_memory_gib": "memory/peak_gib", "memory/host_gib": "memory/host_gib", "eval_reward_mean": "eval/reward_mean",
        "eval/gsm8k/pass@1": "eval/gsm8k/pass@1", "mismatch_k3": "mismatch/k3",
        "stale_mismatch_mean": "mismatch/stale_mean", "lag_max": "mismatch/lag_max", "correction_outside": "correction/outside",
        "route_agreement": "train/route_agreement",
    }  # fmt: skip
    row = {**dict.fromkeys(names, 1.0), "step": 1, "timestamp": 2.0, "skipped": True, "fault": "x"}
    assert grouped(row) == dict.fromkeys(names.values(), 1.0)
