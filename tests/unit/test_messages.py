"""An invalid recipe is told where the mistake is, in the file or on the command line, and how to mend it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.cli.main import run_command
from dovetail.errors import ConfigError
from dovetail.recipe.schema import load_recipe
from tests.helpers.program import write_rows

GIVEN: dict[str, Any] = {"model": {"path": "M"}, "data": {"train": "D"}, "run_dir": "R"}


def written(folder: Path, **sections: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**GIVEN, **sections}))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.sample_per_prompt=4",
            "unknown key rollout.sample_per_prompt; did you mean rollout.samples_per_prompt?",
        ),
        ("optim.lr=1e-5x", "optim.lr is '1e-5x'; expected a valid number"),
        ("optim={lr: x}", "optim.lr is 'x'; expected a valid number"),
        ("algorithm.name=GRPO", "algorithm.name is 'GRPO'; expected one of"),
        ("rollout.backend=vllm", "rollout: backend is vllm: give engines"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt is 1; grpo compares"),
        ("rollouts.top_k=4", "unknown key rollouts.top_k; did you mean rollout.top_k? (keys of"),
        ("rollouts.x=4", "unknown key rollouts; did you mean rollout? (keys of a recipe"),
        ("trainers.steps=4", "unknown key trainers; did you mean trainer? (keys of a recipe"),
        ("rollout_rs=4", "unknown key rollout_rs; rollout_rs is verl's, here algorithm.correction"),
    ],
)
def test_a_mistake_of_the_command_line_is_said_to_be_there(
    override: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(written(tmp_path), [override, "trainer.seed=1"])
    assert str(caught.value).startswith(f"command line: {message}")


def test_mistakes_of_file_and_command_line_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path, optim={"lr": "x", "rate": 1})
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, ["optim.clip_norm=y", "trainer.steps=3"], {"layout.tp": 0})
    first, *lines = str(caught.value).split("\n")
    assert first == f"{path}:"
    of_command = [line for line in lines if line.startswith("  - command line: ")]
    assert [line.split()[3] for line in of_command] == ["layout.tp", "optim.clip_norm"]
    others = [line for line in lines if line not in of_command]
    assert [line.split()[1] for line in others] == ["optim.lr", "unknown"]
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: .*samples_per_prompt is 1"):
        load_recipe(written(tmp_path, rollout={"samples_per_prompt": 1}), ["optim.lr=1"])


@pytest.mark.parametrize("plus", ["+", "++"])
def test_the_plus_of_hydra_is_to_be_dropped(plus: str, tmp_path: Path) -> None:
    words = f"'{plus}trainer.steps' is not a key; drop the +: trainer.steps=value"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_recipe(written(tmp_path), [f"{plus}trainer.steps=2"])


def test_rows_given_as_a_recipe_are_called_rows(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}] * 2)
    words = "is a file of rows (JSON lines); give a YAML file as the recipe, and these as"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_recipe(rows)


def test_the_flag_of_a_model_given_to_train_leads_to_its_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["train", "recipe.yaml", "--model", "M"]) == 2
    told = capsys.readouterr().err
    assert "unrecognized arguments: --model M; model: here model.path" in told
