"""Saving beside training: what is on the disk is what was there at the call; what goes wrong is told, and survived."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import (
    Retention,
    SavedStep,
    clear_debris,
    open_newest,
    saved_steps,
)
from dovetail.checkpoint.writer import Saver
from dovetail.errors import DataError, MachineError
from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh
from dovetail.rl.step_metrics import Row
from dovetail.rl.tasks import SupervisedTask
from dovetail.weights.safetensors import TensorFileWriter
from tests.helpers.program import (
    Ended,
    failure,
    here,
    make_model,
    read_rows,
    refusal,
    write_recipe,
    write_rows,
)
from tests.helpers.saves import NAMES, SIDES, export_of, made_of, order_of
from tests.helpers.training_checkpoint import state_of


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_what_is_saved_is_what_was_there_at_the_call(rounds: int, tmp_path: Path) -> None:
    saver = Saver(tmp_path, Mesh.solo(), Retention(1), background=True)
    tensors = made_of(0, 1)
    for order in range(1, rounds + 1):
        for tensor in tensors.values():
            tensor.fill_(order)
        saver.save(order, [export_of(tensors, 0, 1)], SIDES, state_of(order, order))
        for tensor in tensors.values():  # while it is written
            tensor.fill_(-1)
        saver.finish()
        reader, _ = open_newest(tmp_path, Mesh.solo())
        assert reader is not None and order_of(reader) == order


def test_without_the_background_nothing_is_copied(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Mesh.solo(), Retention(1), background=False)
    saver.save(1, [export_of(made_of(1, 1), 0, 1)], SIDES, state_of(1, 1))
    assert saver.done and saver._arena.num_bytes == 0
    assert saver.finish()
    assert not saver.finish(), "it is told once"


def test_steps_that_are_in_use_are_no_failure_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS a file that is open stays under another name, and so does its directory. A later save removes it."""

    def in_use(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    saver = Saver(tmp_path, Mesh.solo(), Retention(1), background=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", in_use)
        for order in (1, 2, 3):
            saver.save(order, [export_of(made_of(order, 1), 0, 1)], SIDES, state_of(order, order))
            assert saver.finish()
        assert len(list(tmp_path.glob(".trash-*"))) == 2
        clear_debris(tmp_path)
    assert [saved.step for saved in saved_steps(tmp_path)[0]] == [3]
    saver.save(4, [export_of(made_of(4, 1), 0, 1)], SIDES, state_of(4, 4))
    assert saver.finish()
    assert not list(tmp_path.glob(".trash-*"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("planted"), OSError(errno.ENOSPC, "full"), KeyError("planted")]
)
def test_no_failure_of_a_save_is_silent(background: bool, error: Exception, tmp_path: Path) -> None:
    class Failing(dict[str, Any]):
        def items(self) -> Any:
            raise error

    saver = Saver(tmp_path, Mesh.solo(), Retention(1), background=background)
    saver.save(1, [export_of(made_of(1, 1), 0, 1)], Failing(), state_of(1, 1))
    with pytest.raises((type(error), MachineError)):
        saver.finish()
    saver.save(2, [export_of(made_of(2, 1), 0, 1)], SIDES, state_of(2, 2))
    saver.finish()
    (left,) = saved_steps(tmp_path)[0]
    assert left.step == 2
    assert not [*tmp_path.glob(".tmp-*")]


def test_snapshots_use_the_same_memory_again(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Mesh.solo(), Retention(1), background=True)
    sizes = set()
    for order in range(1, 4):
        saver.save(order, [export_of(made_of(order, 1), 0, 1)], SIDES, state_of(order, order))
        saver.finish()
        sizes.add(saver._arena.num_bytes)
    assert sizes == {len(NAMES) * 192}


def test_ranks_wait_for_each_other_as_long_as_the_mesh_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer.timeouts` may give a save more than the half hour that groups are made with."""
    asked = []
    monkeypatch.setattr(dist, "new_group", lambda **how: asked.append(how))
    solo = Mesh.solo()
    mesh = replace(solo, axes={**solo.axes, "world": Axis("world", 2)}, timeout=timedelta(hours=5))
    Saver(tmp_path, mesh, Retention(1), background=True)
    assert asked == [{"backend": "gloo", "timeout": timedelta(hours=5)}]


def runs(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch, fails: set[int]) -> Ended:
    """A run of the command whose n-th saves in `fails` find no space."""
    model = make_model(folder / "model")
    rows = write_rows(folder / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    recipe = write_recipe(
        folder / "r.yaml",
        model,
        rows,
        trainer={"steps": steps, "save_every": 2, "keep_last": 9, "prompts_per_step": 1},
    )
    original, counted = TensorFileWriter.close, [0]

    def close(self: TensorFileWriter) -> None:
        if self.path.name.startswith("pieces-"):
            counted[0] += 1
            if counted[0] in fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self)

    monkeypatch.setattr(TensorFileWriter, "close", close)
    return here("train", recipe)


def test_a_run_survives_saves_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = runs(tmp_path, 12, monkeypatch, {2, 3, 5})
    assert ended.code == 0, ended
    assert ended.out.count("A SAVE FAILED, the run goes on and earlier checkpoints are whole") == 3
    run = tmp_path / "run"
    assert [saved.step for saved in saved_steps(run / "checkpoints")[0]] == [12, 8, 2]
    events = read_rows(run / "events.jsonl")
    assert [event["kind"] for event in events] == ["save_failed"] * 3
    assert "No space left on device" in events[0]["cause"]
    assert (run / "hf").is_dir()


def test_a_run_that_cannot_be_saved_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The third failure in a row ends it; what was saved before is whole."""
    told = failure(runs(tmp_path, 100, monkeypatch, set(range(2, 100))))
    assert (
        "the run cannot be saved; what was saved before is whole" in told
        and "No space left" in told
    )
    assert len(read_rows(tmp_path / "run/metrics.jsonl")) <= 10
    (saved,) = saved_steps(tmp_path / "run/checkpoints")[0]
    ShardedReader(saved.path).verify()


def test_the_model_is_written_even_where_the_last_save_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = failure(runs(tmp_path, 4, monkeypatch, {2}))
    assert "the run cannot be saved; what was saved before is whole" in told
    assert (tmp_path / "run/hf/model.safetensors").is_file()


def test_a_run_that_fails_keeps_the_checkpoint_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: SupervisedTask, step: int, stopping: Callable[[], bool]) -> Row | None:
        if step == 2:
            failing.set()
            raise DataError("no more")
        return original(self, step, stopping)

    def slow(self: TensorFileWriter) -> None:
        assert failing.wait(60)  # the run fails while it is saved
        close(self)

    original, close, failing = SupervisedTask.step, TensorFileWriter.close, threading.Event()
    monkeypatch.setattr(SupervisedTask, "step", fail)
    monkeypatch.setattr(TensorFileWriter, "close", slow)
    model = make_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    trainer = {"steps": 4, "save_every": 2, "prompts_per_step": 1}
    told = refusal(here("train", write_recipe(tmp_path / "r.yaml", model, rows, trainer=trainer)))
    assert "no more" in told
    assert [saved.step for saved in saved_steps(tmp_path / "run/checkpoints")[0]] == [2]


def test_scores_are_of_one_kind(tmp_path: Path) -> None:
    """With evaluations only the evaluated steps have a score; a step that fits the evaluation best is kept."""
    model = make_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    trainer = {
        "steps": 6,
        "save_every": 1,
        "keep_last": 1,
        "keep_best": 1,
        "eval_every": 2,
        "prompts_per_step": 1,
    }
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        trainer=trainer,
        data={"eval": str(rows)},
        optim={"lr": 1.0},
    )
    assert here("train", recipe).code == 0
    evaluated = {
        row["step"]: row["eval_loss"]
        for row in read_rows(tmp_path / "run/metrics.jsonl")
        if "eval_loss" in row
    }
    best = min(evaluated, key=lambda step: evaluated[step])
    steps = {saved.step: saved.score for saved in saved_steps(tmp_path / "run/checkpoints")[0]}
    assert set(steps) == {best, 6}
    assert steps[best] == -evaluated[best]


def test_which_steps_stay() -> None:
    def step(order: int, step: int, score: float | None) -> SavedStep:
        return SavedStep(Path(f"{order}"), step, order, score)

    steps = [
        step(1, 10, 0.5),
        step(2, 20, 0.9),
        step(3, 30, None),
        step(4, 20, 0.9),
        step(5, 30, 0.1),
    ]
    kept = {
        retention: sorted(int(path.name) for path in retention.keeps(steps))
        for retention in (
            Retention(1),
            Retention(2),
            Retention(1, best=1),
            Retention(1, every=20),
            Retention(1, 10, 2),
        )
    }
    assert list(kept.values()) == [[5], [4, 5], [4, 5], [2, 4, 5], [1, 2, 3, 4, 5]]
