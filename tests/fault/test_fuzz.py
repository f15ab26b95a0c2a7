"""Random damage to a model directory, a recipe or a row never ends in a defect of ours: a command works or refuses."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.recipe.schema import known_keys
from tests.helpers.program import here, write_recipe, write_rows

# No large numbers: what memory holds is for the machine to say.
ODD: tuple[Any, ...] = (
    None,
    "x",
    "",
    -1,
    0,
    1,
    3,
    1.5,
    True,
    [],
    ["x"],
    {},
    {"x": 1},
    [[]],
    "\ud800",
)
ROUNDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 9))]
)
TRIES = 30  # of each seed
IN_SHORT = 5  # of seed 0


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def check(*argv: object) -> int:
    ended = here(*argv)
    assert ended.code in (0, 2), ended.err
    errors = [line for line in ended.err.splitlines() if not line.startswith("dovetail: note: ")]
    assert (ended.code == 0) == (errors == []), ended
    return ended.code


@ROUNDS
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_odd_values_in_the_models_json(name: str, seed: int, copy: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    whole = json.loads((copy / name).read_text())
    keys = [
        *whole,
        "rope_scaling",
        "layer_types",
        "sliding_window",
        "eos_token_id",
        "chat_template",
        "auto_map",
    ]
    rng, codes = random.Random(seed), set()
    for _ in range(TRIES if seed else 2 * IN_SHORT):
        key, value = rng.choice(keys), rng.choice(ODD)
        (copy / name).write_text(json.dumps({**whole, key: value}))
        codes.add(
            check(
                "generate",
                "--model",
                copy,
                "--data",
                rows,
                "--out",
                tmp_path / "o",
                "--max-new-tokens",
                1,
            )
        )
    assert codes == {0, 2} or name != "config.json"


@ROUNDS
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_flipped_bytes(name: str, seed: int, copy: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    whole = (copy / name).read_bytes()
    rng = random.Random(seed)
    for _ in range(TRIES if seed else IN_SHORT):
        at = rng.randrange(min(len(whole), 4000))  # the header, where most harm is done
        (copy / name).write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
        check("score", "--model", copy, "--data", rows, "--out", tmp_path / "o")


@ROUNDS
@pytest.mark.parametrize("command", ["score", "generate", "sft", "grpo"])
def test_odd_rows(command: str, seed: int, model: Path, tmp_path: Path) -> None:
    good = {
        "input_ids": [5],
        "prompt": "a",
        "completion": "b",
        "answer": 1,
        "messages": [{"role": "user", "content": "a"}],
    }
    rng = random.Random(seed)
    recipe = write_recipe(
        tmp_path / "r.yaml", model, tmp_path / "rows.jsonl", algorithm={"name": command}
    )
    for _ in range(TRIES if seed else IN_SHORT):
        row: dict[str, Any] = {
            key: good[key] for key in rng.sample(sorted(good), rng.randint(1, 4))
        }
        row[rng.choice([*good, "id", "data_source", "extra_info"])] = rng.choice(ODD)
        if "messages" in row and rng.random() < 0.5:
            row["messages"] = row["prompt"] = [
                {"role": rng.choice(ODD), "content": rng.choice(ODD)}
            ]
        write_rows(tmp_path / "rows.jsonl", [row])
        if command in ("score", "generate"):
            flags = ["--max-new-tokens", 1] if command == "generate" else []
            check(
                command,
                "--model",
                model,
                "--data",
                tmp_path / "rows.jsonl",
                "--out",
                tmp_path / "o",
                *flags,
            )
        else:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            check("train", recipe, "--dry-run" if command == "grpo" else "trainer.steps=1")


@ROUNDS
def test_odd_values_in_a_recipe(seed: int, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, algorithm={"name": "grpo"})
    whole = yaml.safe_load(recipe.read_text())
    keys = [
        key
        for key in known_keys()
        if key not in ("layout.tp", "layout.dp", "layout.pp", "layout.cp", "run_dir")
    ]
    rng = random.Random(seed)
    for _ in range(TRIES if seed else IN_SHORT):
        changed = json.loads(json.dumps(whole))
        *sections, leaf = rng.choice(keys).split(".")
        inner = changed
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = rng.choice([value for value in ODD if value != "\ud800"])
        recipe.write_text(yaml.safe_dump(changed))
        check("train", recipe, "--dry-run")
