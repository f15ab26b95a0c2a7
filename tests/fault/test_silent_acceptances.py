"""Odd inputs that were once taken without a word, or ended in a traceback: one message, exit 2, before any step."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.program import here, refusal, write_recipe, write_rows

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            '{"prompt": "a", "prompt": "b", "completion": "c"}',
            "the key 'prompt' appears twice in an object; keep one",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "weight": -1}]},
            "message 1 (assistant) has the weight -1; expected 1, or 0",
        ),
        (
            {"messages": [{**USER, "weight": -1}, ASSISTANT]},
            "message 0 (user) has the weight -1; expected 1, or 0",
        ),
        (
            {"prompt": "", "completion": ""},
            "nothing to train: no token follows another one and is trained",
        ),
        ({"text": ""}, "nothing to train: no token follows another one and is trained"),
        (
            {"input_ids": [5, 6], "labels": [5, -100]},
            "nothing to train: no token follows another one and is trained",
        ),
    ],
    ids=["twice", "weight", "weight of a user", "empty", "empty text", "first token alone"],
)
def test_rows(row: Any, words: str, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    told = refusal(here("train", write_recipe(tmp_path / "r.yaml", model, rows)))
    assert f"rows.jsonl:1: {words}" in told
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_whose_words_share_one_id(model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model, tmp_path / "model"))
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = dict.fromkeys(tokenizer["model"]["vocab"], 0)
    file.write_text(
        json.dumps(
            {**tokenizer, "added_tokens": [], "model": {**tokenizer["model"], "vocab": vocab}}
        )
    )
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    told = refusal(here("train", write_recipe(tmp_path / "r.yaml", model, rows)))
    assert "words have the same id" in told, told


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_safetensors_header_of_deep_nesting(opening: str, model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model, tmp_path / "model"))
    header = opening.encode() * 100_000
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6]}])
    for argv in (
        ["score", "--model", model, "--data", rows, "--out", tmp_path / "out.jsonl"],
        ["train", write_recipe(tmp_path / "r.yaml", model, rows)],
    ):
        told = refusal(here(*argv))
        assert "model.safetensors is cut, corrupt or no safetensors file" in told, told


def test_a_name_that_is_too_long(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows)
    name = str(tmp_path / ("x" * 300))
    commands: list[list[object]] = [
        ["train", recipe, f"run_dir={name}"],
        ["train", recipe, f"data.train={name}"],
        ["score", "--model", model, "--data", rows, "--out", name],
        ["convert", model, name, "--to", "sharded"],
        ["inspect", name],
        ["report", name],
    ]
    for argv in commands:
        told = refusal(here(*argv))
        assert "File name too long" in told or "no such" in told, (argv, told)
        assert len(told) < 1000, told
