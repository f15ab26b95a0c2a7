"""Hub names: only pinned to a commit, only safetensors and JSON. A stand-in takes the hub's place."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.helpers.program import here, refusal, write_recipe, write_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the hub was asked for."""
    calls: list[dict[str, Any]] = []

    def snapshot(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return str(model)

    monkeypatch.setattr("dovetail.weights.hf_directory.snapshot_download", snapshot)
    return calls


def test_a_pinned_name_fetches_safetensors_and_json_only(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"input_ids": [5, 6], "prompt": "a", "completion": "b"}]
    )
    name = f"org/a-model.v2@{COMMIT}"
    assert here("score", "--model", name, "--data", rows, "--out", tmp_path / "o").code == 0
    assert here("generate", "--model", name, "--data", rows, "--out", tmp_path / "o").code == 0
    assert here("convert", name, tmp_path / "cut", "--to", "sharded").code == 0
    assert here("train", write_recipe(tmp_path / "r.yaml", Path(name), rows)).code == 0
    expected = {
        "repository": "org/a-model.v2",
        "revision": COMMIT,
        "allow_patterns": ["*.safetensors", "*.json"],
    }
    assert len(asked) == 4
    assert all(call == expected for call in asked)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "org/model",
            "org/model is not a directory; for a hub model, pin it to a commit: org/model@COMMIT",
        ),
        (
            "org/model@main",
            "'main' is not a commit; a branch or tag can move, so give the 40 hexadecimal digits",
        ),
        ("org/model@v1.0", "'v1.0' is not a commit"),
        (f"org/model@{COMMIT[:7]}", "is not a commit"),
        (f"org/model@{COMMIT.upper()}", "is not a commit"),
        ("org/model@", "'' is not a commit"),
        (f"../../etc/passwd@{COMMIT}", "is not a directory"),
        ("model", "model is not a directory"),
    ],
)
def test_anything_else_asks_nobody(
    name: str, words: str, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
    assert words in refusal(here("score", "--model", name, "--data", rows, "--out", tmp_path / "o"))
    assert asked == []


def test_a_hub_that_does_not_answer_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
    argv = ["score", "--model", f"org/model@{COMMIT}", "--data", rows, "--out", tmp_path / "o"]
    assert "could not be fetched from the hub" in refusal(here(*argv))
