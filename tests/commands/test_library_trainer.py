"""`dt.Trainer`: the same run as `dovetail train`, what its callbacks change, and what it leaves in a process that goes on."""

import contextlib
import io
import re
import runpy
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

import dovetail as dt
from dovetail.errors import CallbackError, ConfigError, LayoutError
from dovetail.launch.supervisor import _free_port
from dovetail.recipe.schema import load_recipe
from dovetail.run.paths import FinishedError
from dovetail.weights.safe_paths import MANIFEST
from tests.helpers.checkpoints import assert_same_tensors, tensors_of
from tests.helpers.harness import run
from tests.helpers.program import here, read_rows, start, write_recipe, write_rows

ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "timestamp", "memory", "tokens_per", "samples_per", "mfu", "gpu")


def numbers(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [
        {name: x for name, x in row.items() if not any(part in name for part in TIMES)}
        for row in rows
    ]


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}, {"prompt": "hi", "answer": "h"}]
    )
    (tmp_path / "mine.py").write_text(
        "def length(data_source, solution_str, ground_truth):\n    return len(solution_str)\n"
    )
    return write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        data={"eval": str(rows)},
        reward={"import": "mine:length"},
        trainer={"steps": 3, "save_every": 1, "keep_last": 3},
    )


def given(recipe: Path, run_dir: str, **trainer: Any) -> dict[str, Any]:
    """A mapping, with another run_dir."""
    keys: dict[str, Any] = yaml.safe_load(recipe.read_text())
    return {
        **keys,
        "trainer": {**keys["trainer"], **trainer},
        "run_dir": str(recipe.parent / run_dir),
    }


def test_it_runs_what_the_command_runs(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, a Recipe or a mapping, several times in a process, which is afterwards as it was."""
    assert here("train", recipe).code == 0
    monkeypatch.chdir(tmp_path)  # where a mapping's functions are
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    streams = sys.stdout, sys.stderr
    mapping = given(recipe, "mapping")
    moved = load_recipe(recipe, [f"run_dir={tmp_path / 'moved'}"])
    for trainer in (
        dt.Trainer(mapping, device="cpu"),
        dt.Trainer(moved, [dt.TrainerCallback()], device="cpu"),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            outcome = trainer.train()
        assert out.getvalue().count("step 3/3") == 1
        folder = Path(trainer.recipe.run_dir)
        assert numbers(folder) == numbers(tmp_path / "run")
        assert_same_tensors(tensors_of(folder / "hf"), tensors_of(tmp_path / "run/hf"))
        assert outcome.rows[-1]["loss"] == numbers(folder)[-1]["loss"] and not outcome.stopped
        assert (
            not dist.is_initialized()
            and not (folder / ".lock").exists()
            and (sys.stdout, sys.stderr) == streams
        )
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    with pytest.raises(FinishedError, match="is finished"):
        dt.Trainer(recipe, device="cpu").train()
    with pytest.raises(
        LayoutError,
        match=r"layout tp=2.* needs a multiple of 2 ranks, .* `torchrun --nproc-per-node N",
    ):
        dt.Trainer({**mapping, "layout": {"tp": 2}}, device="cpu").train()
    with pytest.raises(
        ConfigError,
        match=r"callbacks has <class .*expected objects of classes made from dt\.TrainerCallback",
    ):
        dt.Trainer(recipe, [dt.TrainerCallback])  # type: ignore[list-item]
    assert not dist.is_initialized()


class Everything(dt.TrainerCallback):
    """Halves the rate before each step, rewards even samples, and writes down what happens."""

    def __init__(self, fail: str = "") -> None:
        self.events, self.fail = list[tuple[Any, ...]](), fail

    def note(self, event: str, state: dt.TrainerState, *more: Any) -> None:
        self.events.append((event, state.global_step, *more))
        if (
            event == self.fail
            and state.global_step == 2
            and not (dist.get_world_size() > 1 and dist.get_rank() == 0)
        ):
            raise ValueError("mine")

    def on_train_begin(self, state: dt.TrainerState) -> None:
        self.note("train_begin", state)

    def on_step_begin(self, state: dt.TrainerState) -> None:
        self.note("step_begin", state)
        state.engine.param_groups[0].lr = 2.0 ** -(10 + state.global_step)

    def on_rollout_end(self, state: dt.TrainerState, samples: list[dt.Sample]) -> list[dt.Sample]:
        self.note("rollout_end", state, len(samples))
        kept = [sample for sample in samples if sample.group == 0]
        return [replace(sample, reward=float(sample.completion.sample % 2 == 0)) for sample in kept]

    def on_step_end(self, state: dt.TrainerState, metrics: dict[str, Any]) -> None:
        self.note("step_end", state)
        metrics["rank"] = dist.get_rank()
        assert state.is_world_process_zero == (dist.get_rank() == 0)
        state.should_training_stop = (
            state.global_step == 3 and dist.get_rank() == dist.get_world_size() - 1
        )

    def on_evaluate(self, state: dt.TrainerState, metrics: dict[str, Any]) -> None:
        self.note("evaluate", state)
        metrics["eval_updates"] = state.engine.updates

    def on_save(self, state: dt.TrainerState, path: Path) -> None:
        assert (path / MANIFEST).is_file()
        self.note("save", state, path.name)

    def on_train_end(self, state: dt.TrainerState) -> None:
        assert (Path(state.recipe.run_dir) / "hf").is_dir()
        self.note("train_end", state)


def trained(
    recipe: dict[str, Any], fail: str = ""
) -> tuple[list[tuple[Any, ...]], str, list[dict[str, Any]]]:
    """On one rank of several: what its callback was called for, the error, and the rows."""
    callback, error, rows = Everything(fail), "", list[dict[str, Any]]()
    try:
        rows = dt.Trainer(recipe, [callback], device="cpu").train().rows
    except CallbackError as raised:
        error = str(raised)
    return callback.events, error, rows


@pytest.mark.parametrize("world", [1, 2])
def test_callbacks_are_called_on_every_rank_and_change_the_run(
    recipe: Path, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {
        **given(recipe, "changed", steps=9, async_save=False),
        "reward": {"name": "exact_match"},
    }
    found = run(world, trained, keys)
    expected: list[tuple[Any, ...]] = [("train_begin", 0), ("evaluate", 0)]
    for n in range(3):
        expected += [("step_begin", n), ("rollout_end", n, 4), ("step_end", n + 1)]
        expected += [("evaluate", 3)] * (n == 2) + [("save", n + 1, f"step_{n + 1:06}")]
    assert [each[0] for each in found] == [[*expected, ("train_end", 3)]] * world
    rows = read_rows(tmp_path / "changed/metrics.jsonl")
    assert [row["lr"] for row in rows] == [2.0**-10, 2.0**-11, 2.0**-12]
    assert [(row["reward_mean"], row["rank"]) for row in rows] == [(0.5, 0)] * 3
    assert rows[-1]["eval_updates"] == 3 and rows[0]["eval_updates_before"] == 0
    assert [
        sample["sample"] for sample in read_rows(tmp_path / "changed/rollouts/step_000002.jsonl")
    ] == [0, 1]


def test_an_error_of_a_callback_ends_the_run_on_all_ranks(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on the second rank alone, too; what was saved is gone on from, by a second Trainer of the same processes."""
    monkeypatch.chdir(tmp_path)
    keys = {**given(recipe, "failed", async_save=False), "reward": {"name": "exact_match"}}
    message = "Everything.on_step_end failed on rank 1, after step 2 of 3: ValueError: mine; what the run has saved is whole"
    for _, error, _ in run(2, trained, keys, "step_end"):
        assert error == message
    assert [row["step"] for row in read_rows(tmp_path / "failed/metrics.jsonl")] == [1]
    found = run(2, trained, keys)
    assert [events[0] for events, _, _ in found] == [("train_begin", 1)] * 2
    assert [row["step"] for row in read_rows(tmp_path / "failed/metrics.jsonl")] == [1, 2, 3]


SCRIPT = """
import sys
import torch.distributed as dist
import dovetail as dt
for name in ("first", "second"):
    recipe = {recipe!r} | {{"run_dir": name}}
    outcome = dt.Trainer(recipe, device="cpu").train()
    assert not dist.is_initialized()
sys.stderr.write(f"loss {{outcome.rows[-1]['loss']}}")
"""


def test_a_script_of_two_ranks_trains_twice(recipe: Path, tmp_path: Path) -> None:
    """Started as torchrun starts it; the second time is as the first."""
    keys = {**given(recipe, "", steps=1, save_every=0), "reward": {"name": "exact_match"}}
    (tmp_path / "script.py").write_text(SCRIPT.format(recipe=keys))
    env = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    ranks = [
        start(env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, python=["script.py"], cwd=tmp_path)
        for r in range(2)
    ]
    told = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    assert told[0][1] == told[1][1] != "" and told[1][0] == "", "the first rank alone speaks"
    assert numbers(tmp_path / "first") == numbers(tmp_path / "second")


def test_the_example_of_the_page_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}, {"prompt": "hi", "answer": "h"}]
    )
    _, block = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(block.replace('"MODEL"', repr(str(model))))
    outcome = runpy.run_path("example.py")["outcome"]
    assert [row["lr"] for row in outcome.rows] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    lengths = [row["response_length_mean"] for row in outcome.rows]
    assert [row["reward_mean"] for row in outcome.rows] == pytest.approx(
        [-0.1 * length for length in lengths]
    )
    assert outcome.rows[-1]["reward_so_far"] == max(row["reward_mean"] for row in outcome.rows)
    assert "checkpoints/step_000002 is whole" in capfd.readouterr().out.replace("\n", "")


class Interrupts(dt.TrainerCallback):
    def on_step_end(self, state: dt.TrainerState, metrics: dict[str, Any]) -> None:
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)


def test_a_signal_saves_and_the_next_call_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may come in another thread, where Python sets no handlers."""
    monkeypatch.chdir(tmp_path)
    keys = {**given(recipe, "stopped", save_every=0), "reward": {"name": "exact_match"}}
    handler = signal.getsignal(signal.SIGINT)
    outcome = dt.Trainer(keys, [Interrupts()], device="cpu").train()
    assert (
        outcome.stopped
        and [row["step"] for row in outcome.rows] == [1]
        and not (tmp_path / "stopped/hf").exists()
    )
    assert signal.getsignal(signal.SIGINT) == handler
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(dt.Trainer(keys, device="cpu").train).result()
    assert not outcome.stopped and [row["step"] for row in outcome.rows] == [1, 2, 3]
    assert (tmp_path / "stopped/hf").exists()
