"""Recipes and rows for the checks before ranks start."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

SIZES = {
    "vocab_size": 8,
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
GOOD = {"prompt": "2+2?", "answer": "4"}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What would have started; the working directory has a model M and a recipe of grpo."""
    calls: list[object] = []
    (tmp_path / "M").mkdir()
    (tmp_path / "M/config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (tmp_path / "M/tokenizer.json").write_text("{}")
    (tmp_path / "M/model.safetensors").write_text("")
    recipe = {"model": {"path": "M"}, "data": {"train": "D.jsonl"}, "run_dir": "run"}
    (tmp_path / "R.yaml").write_text(yaml.safe_dump({**recipe, "algorithm": {"name": "grpo"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("dovetail.system.free_memory", lambda: 10**12)

    def start(*given: object) -> int:
        calls.append(given)
        return 0

    monkeypatch.setattr("dovetail.cli.main._run_as_rank", start)
    return calls


def write(*rows: Mapping[str, Any] | str, name: str = "D.jsonl") -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(f"{line}\n" for line in lines))
