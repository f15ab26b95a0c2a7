"""No file of a model, checkpoint or data directory is executed or unpickled, unless --trust-remote-code says so."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands.program import here, on_ranks, program, refusal, write_recipe, write_rows

TRAP = "import pathlib\npathlib.Path({sentinel!r}).write_text('executed')\n"
TOKENIZER = "from transformers import PreTrainedTokenizerFast\nclass Trap(PreTrainedTokenizerFast):\n    pass\n"


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.sentinel, "unpickled")


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "sentinel"


@pytest.fixture
def trapped(model: Path, tmp_path: Path, sentinel: Path) -> Path:
    """A good model with code in every place where a loader could fall for it."""
    path = Path(shutil.copytree(model, tmp_path / "model"))
    code = TRAP.format(sentinel=str(sentinel))
    names = ("modeling_trap", "configuration_trap", "tokenization_trap", "conftest", "sitecustomize", "torch", "yaml")
    for name in (*names, "json", "reward", "setup", "__init__"):
        (path / f"{name}.py").write_text(code + TOKENIZER)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"):
        (path / name).write_bytes(pickle.dumps(Bomb(sentinel)))
    maps = {
        "config.json": {
            "AutoConfig": "configuration_trap.Trap",
            "AutoModelForCausalLM": "modeling_trap.Trap",
            "AutoTokenizer": ["tokenization_trap.Trap", "tokenization_trap.Trap"],
        },
        "tokenizer_config.json": {"AutoTokenizer": [None, "tokenization_trap.Trap"]},
        "generation_config.json": {"AutoConfig": "configuration_trap.Trap"},
    }
    for name, auto_map in maps.items():
        given = json.loads((path / name).read_text()) | {"auto_map": auto_map}
        (path / name).write_text(json.dumps(given))
    return path


def test_no_command_executes_what_lies_in_the_model(trapped: Path, sentinel: Path, tmp_path: Path) -> None:
    text = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd", "answer": "x"}])
    ids = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6]}])
    recipe = write_recipe(tmp_path / "r.yaml", trapped, text, algorithm={"name": "grpo"})
    for argv in (
        ["score", "--model", trapped, "--data", text, "--out", tmp_path / "o"],
        ["score", "--model", trapped, "--data", ids, "--out", tmp_path / "o"],
        ["generate", "--model", trapped, "--data", text, "--out", tmp_path / "o"],
        ["train", recipe],
        ["convert", trapped, tmp_path / "cut", "--to", "sharded"],
        ["convert", tmp_path / "cut", tmp_path / "hf", "--to", "hf"],
        ["inspect", tmp_path / "cut", "--verify"],
    ):
        ended = here(*argv)
        assert ended.code in (0, 2), ended
        assert not sentinel.exists(), f"{argv[0]} executed code of the model"
    assert here("score", "--model", trapped, "--data", ids, "--out", tmp_path / "o").code == 0, "ids need no tokenizer"
    assert {ended.code for ended in on_ranks(2, "train", recipe, f"run_dir={tmp_path}/b")} <= {0, 2}
    assert not sentinel.exists()


def test_a_tokenizer_that_only_its_own_code_knows_is_refused_and_runs_with_the_flag(
    trapped: Path, sentinel: Path, tmp_path: Path
) -> None:
    """The second half shows that the trap works, so the first half can fail."""
    named = json.loads((trapped / "tokenizer_config.json").read_text())
    (trapped / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "Trap"}))
    for name in ("torch", "yaml", "json", "sitecustomize"):
        (trapped / f"{name}.py").unlink()
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    argv = ["score", "--model", trapped, "--data", rows, "--out", tmp_path / "o"]
    ended = here(*argv)
    assert not sentinel.exists()
    if ended.code:
        assert "its tokenizer does not load" in refusal(ended)
    ended = here(*argv, "--trust-remote-code")
    assert sentinel.read_text() == "executed", ended


def test_pickles_alone_are_refused_unread(trapped: Path, sentinel: Path, tmp_path: Path) -> None:
    (trapped / "model.safetensors").unlink()
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
    told = refusal(here("score", "--model", trapped, "--data", rows, "--out", tmp_path / "o", "--trust-remote-code"))
    assert "has only pickled weights (model.pkl, optimizer.pt, pytorch_model.bin)" in told
    assert not sentinel.exists()


def test_ranks_and_rewards_import_nothing_from_the_working_directory(
    trapped: Path, sentinel: Path, tmp_path: Path
) -> None:
    """Whoever stands in a model's directory must not run its json.py: as the installed program, on two ranks."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "x"}] * 2)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        given = json.loads((trapped / name).read_text())
        del given["auto_map"]
        (trapped / name).write_text(json.dumps(given))
    recipe = write_recipe(tmp_path / "r.yaml", trapped, rows, algorithm={"name": "grpo"}, trainer={"steps": 1})
    ended = program("train", recipe, "--layout", "tp=2", cwd=trapped, python=["-P", "-m", "dovetail"])
    assert (ended.code, ended.err) == (0, ""), ended
    assert not sentinel.exists()


def test_recipes_execute_no_yaml_tags(sentinel: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: !!python/object/apply:os.system ['touch {sentinel}']\n")
    assert "is not valid YAML" in refusal(here("train", recipe))
    given = f"model.path=!!python/object/apply:os.system ['touch {sentinel}']"
    assert "is not valid YAML" in refusal(here("train", recipe, given))
    assert not sentinel.exists()
