"""Loggers: a missing one is refused with the command that installs it; one that fails or hangs never stops a run."""

import importlib.util
import sys
from pathlib import Path

import pytest

from dovetail.run.loggers import grouped
from tests.helpers.program import (
    here,
    on_ranks,
    program,
    read_rows,
    refusal,
    write_recipe,
    write_rows,
)

FAILING = "def init(**options):\n    raise RuntimeError('no network')\n"
HANGING = "import time\ndef init(**options):\n    time.sleep(1000)\n"
LATE = """
import time
class Run:
    step = 0
    def define_metric(self, *names, **options): pass
    def log(self, row, step):
        if step == 2:
            raise RuntimeError("lost the network")
    def finish(self):
        time.sleep(1000)
def init(**options):
    return Run()
"""
GOOD = """
import json
class Table:
    def __init__(self, columns, data): raise AssertionError("no samples in supervised training")
class Run:
    step = 0
    def define_metric(self, *names, **options): pass
    def __init__(self, dir):
        self.path = dir + "/seen"
    def log(self, row, step):
        with open(self.path, "a") as out:
            out.write(json.dumps([step, row]) + "\\n")
    def finish(self):
        with open(self.path, "a") as out:
            out.write("[\\"end\\"]\\n")
def init(project, entity, name, tags, group, id, resume, dir, config):
    assert config["trainer"]["steps"] == 3 and resume == "allow" and len(id) == 32
    assert (project, entity, name, tags, group) == ("dovetail", None, "run", None, None)
    return Run(dir)
"""


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    return write_recipe(
        tmp_path / "r.yaml", model, rows, trainer={"steps": 3, "loggers": ["wandb"]}
    )


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard", "trackio", "swanlab"])
def test_a_missing_logger_is_refused_with_the_command_that_installs_it(
    name: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda asked, *rest: None if asked == name else find(asked, *rest),
    )
    told = refusal(here("train", recipe, f"trainer.loggers=[{name}]"))
    assert (
        f"trainer.loggers has {name}, which is not installed: pip install 'dovetail-rl[{name}]'"
        in told
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_logger_is_refused_by_all_ranks(recipe: Path) -> None:
    ended = on_ranks(2, "train", recipe)
    assert len({(each.code, each.err) for each in ended}) == 1
    assert "wandb, which is not installed: pip install 'dovetail-rl[wandb]'" in refusal(ended[0])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_folder_of_that_name_is_no_logger(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "which is not installed" in refusal(here("train", recipe))


def test_unknown_loggers_name_the_known(recipe: Path) -> None:
    told = refusal(here("train", recipe, "trainer.loggers=[clearml]"))
    assert "clearml" in told
    assert "expected 'wandb', 'mlflow', 'tensorboard', 'trackio' or 'swanlab'" in told


@pytest.mark.parametrize("module", [FAILING, HANGING, LATE], ids=["fails", "hangs", "fails later"])
def test_a_bad_logger_never_stops_a_run(
    module: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("TRIAL_SECONDS", "LAST_SECONDS"):
        monkeypatch.setattr(f"dovetail.run.metrics.{limit}", 0.2 if module == HANGING else 60.0)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    ended = here("train", recipe)
    assert (ended.code, ended.err) == (0, "")
    assert {
        FAILING: "RuntimeError: no network",
        HANGING: "busy for 0.2 s",
        LATE: "lost the network",
    }[module] in ended.out
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "run/hf/config.json").exists()


def test_a_good_logger_gets_every_row_and_is_finished(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(GOOD)
    ended = program("train", recipe, env={"PYTHONPATH": str(tmp_path / "modules")})
    assert (ended.code, ended.err) == (0, ""), ended
    *seen, end = read_rows(tmp_path / "run/seen")
    written = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in written] == [1, 2, 3]
    assert seen == [[row["step"], {"step": row["step"], **grouped(row)}] for row in written]  # type: ignore[comparison-overlap]
    assert end == ["end"]  # type: ignore[comparison-overlap]
