"""Trackers: the arguments they start with, by stand-ins; and, where one is installed, a run that is resumed once into it.

`make soak` runs the latter for those of wandb, mlflow-skinny, tensorboard, trackio and swanlab that the environment has.
"""

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from dovetail.recipe.tracking import LoggerSection
from dovetail.run.loggers import RunFacts, start_logger
from tests.helpers.program import program, read_rows, write_recipe, write_rows

RUN = "0123456789abcdef"
FULL: dict[str, Any] = {
    "project": "p",
    "entity": "e",
    "run_name": "n",
    "tags": ("t",),
    "group": "g",
}
KEY = "sesame-open-1234567890"
EXPECTED: dict[str, dict[str, Any]] = {
    "wandb": {
        "project": "p", "entity": "e", "name": "n", "tags": ("t",), "group": "g", "id": RUN, "resume": "allow", "dir": "FOLDER",
        "config": {"a": 1},
    },
    "trackio": {
        "project": "p", "name": "n-01234567", "group": "g", "config": {"a": 1}, "resume": "allow", "embed": False,
    },
    "swanlab": {
        "project": "p", "workspace": "e", "name": "n", "tags": ["t"], "group": "g", "id": RUN, "resume": "allow",
        "log_dir": "FOLDER/swanlog", "config": {"a": 1},
    },
}  # fmt: skip
VARIABLES = {
    "wandb": ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID"),
    "swanlab": ("SWANLAB_PROJ_NAME", "SWANLAB_EXP_NAME"),
}


def started(name: str, folder: Path, **keys: Any) -> MagicMock:
    """A stand-in for the library, after a start."""
    section = LoggerSection(name=name, **keys)  # type: ignore[arg-type]
    start_logger(section, RunFacts(path=folder, config={"a": 1}, run_id=RUN))
    module = sys.modules[name]
    assert isinstance(module, MagicMock)
    return module


@pytest.mark.parametrize("name", EXPECTED)
def test_keys_of_a_logger_arrive(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, MagicMock())
    given = started(name, tmp_path, **FULL).init.call_args.kwargs
    expected = {
        k: v.replace("FOLDER", str(tmp_path)) if isinstance(v, str) else v
        for k, v in EXPECTED[name].items()
    }
    assert given == expected


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_a_tracker_are_left_to_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, MagicMock())
    for variable in VARIABLES[name]:
        monkeypatch.setenv(variable, "theirs")
    given = started(name, tmp_path).init.call_args.kwargs
    assert given["project"] is None and given["name"] is None
    assert given["id"] == (None if name == "wandb" else RUN)


@pytest.mark.soak
@pytest.mark.parametrize("name", EXPECTED)
def test_the_stand_ins_have_the_interface_of_the_libraries(name: str) -> None:
    module = pytest.importorskip(name)
    signature = inspect.signature(module.init)
    signature.bind(**EXPECTED[name])
    assert set(EXPECTED[name]) <= set(signature.parameters), "not merely taken by **kwargs"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard", "trackio", "swanlab"])
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(
    name: str, model: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}])
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        trainer={"loggers": [{"name": name, "project": "p"}]},
    )
    paths = [path for path in sys.path if (Path(path) / name).is_dir()][:1]
    env = {
        "PYTHONPATH": paths[0],
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "HOME": str(tmp_path),
    }
    env |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_API_KEY": KEY, "SWANLAB_API_KEY": KEY}
    for steps in (2, 4):
        ended = program(
            "train",
            recipe,
            f"trainer.steps={steps}",
            "trainer.save_every=2",
            env=env,
            executed=True,
        )
        assert (
            ended.code == 0 and "gets no more" not in ended.out and "may lack" not in ended.out
        ), ended
        if steps == 2:
            (tmp_path / "run/hf").rename(tmp_path / "hf")  # the run is not finished
    losses = [row["loss"] for row in read_rows(tmp_path / "run/metrics.jsonl")]
    assert READERS[name](tmp_path, "train/loss") == {
        step: pytest.approx(loss) for step, loss in enumerate(losses, 1)
    }
    files = [
        path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.is_symlink()
    ]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def _wandb(folder: Path, metric: str) -> dict[int, float]:
    """Its files are its own: one id of both starts, and the metric's name; the rows are those of our file."""
    files = sorted((folder / "run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1
    assert all(metric.encode() in path.read_bytes() for path in files)
    return {
        row["step"]: row[metric.removeprefix("train/")]
        for row in read_rows(folder / "run/metrics.jsonl")
    }


def _mlflow(folder: Path, metric: str) -> dict[int, float]:
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{folder}/run/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FINISHED"
    return {entry.step: entry.value for entry in client.get_metric_history(run.info.run_id, metric)}


def _tensorboard(folder: Path, metric: str) -> dict[int, float]:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "run/tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(metric)}


def _trackio(folder: Path, metric: str) -> dict[int, float]:
    code = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; (run,) = S.get_runs('p'); "
    code += f"print(json.dumps([[r['step'], r[{metric!r}]] for r in S.get_logs('p', run)]))"
    paths = [path for path in sys.path if (Path(path) / "trackio").is_dir()][:1]
    ended = program(
        python=["-c", code],
        executed=True,
        env={"PYTHONPATH": paths[0], "TRACKIO_DIR": str(folder / "trackio")},
    )
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


def _swanlab(folder: Path, metric: str) -> dict[int, float]:
    """Its files are its own: the id of both starts, and the rows that our file has."""
    ids = {path.name.rpartition("-")[2] for path in (folder / "run/swanlog").glob("run-*")}
    assert len(ids) == 1
    return {
        row["step"]: row[metric.removeprefix("train/")]
        for row in read_rows(folder / "run/metrics.jsonl")
    }


READERS = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "swanlab": _swanlab,
}
