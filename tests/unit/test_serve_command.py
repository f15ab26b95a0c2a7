"""`dovetail serve` before it serves: what is missing or wrong is said before torch is imported."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli.main import run_command
from dovetail.errors import ConfigError
from dovetail.factory.inference_servers import server_start
from dovetail.recipe.schema import make_recipe
from dovetail.serving.extra import PACKAGES, require_serve

WITHOUT_TORCH = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from dovetail.cli.main import run_command
sys.exit(run_command(sys.argv[1:]))
"""


def test_a_model_that_is_not_there_is_said_without_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH, "serve", str(tmp_path / "none")]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    gone = ("uvicorn", "httptools")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in gone else find(name, *more)
    )
    with pytest.raises(ConfigError, match=r"here: pip install 'dovetail-rl\[serve\]'"):
        require_serve("rollout.start with backend native")
    assert run_command(["serve", "nowhere"]) == 2
    needs = "dovetail serve needs uvicorn, httptools, not installed here"
    assert needs in " ".join(capsys.readouterr().err.split())


def test_the_extra_has_all_that_is_asked_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("serve = ")]
    assert all(f'"{name}>=' in line for name in PACKAGES)


def test_a_server_of_a_run_takes_files_from_the_runs_directory(tmp_path: Path) -> None:
    rollout = {"backend": "native", "start": {}, "push": {"directory": str(tmp_path)}}
    recipe = make_recipe(
        {"model": {"path": "."}, "data": {"train": "d"}, "run_dir": "r", "rollout": rollout}
    )
    start = server_start(recipe, ranks_on_gpus=False)
    assert start is not None
    (words,) = start.commands
    assert words[words.index("--push-dir") + 1] == str(tmp_path)
