"""A gradient that is not finite skips the update, on every rank, and the run goes on."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import assert_same_tensors, tensors_of
from tests.commands.program import here, make_model, on_ranks, read_rows, write_recipe, write_rows


@pytest.fixture
def exploding(tmp_path: Path) -> Path:
    """A model whose logits overflow float32."""
    path = make_model(tmp_path / "exploding")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= 3e38
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("layout", ["tp=1", "tp=2", "dp=2"])
def test_skipped_updates_leave_the_weights_as_they_are(layout: str, exploding: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    recipe = write_recipe(tmp_path / "r.yaml", exploding, rows)
    if layout == "tp=1":
        ended = here("train", recipe)
        assert (ended.code, ended.err) == (0, "")
        assert "UPDATE SKIPPED: the gradient was not finite" in ended.out
    else:
        assert {ended.code for ended in on_ranks(2, "train", recipe, "--layout", layout)} == {0}
    metrics = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["skipped"] for row in metrics] == [True, True]
    assert all(row["grad_norm"] is None for row in metrics), "JSON has no other word for it"
    assert_same_tensors(tensors_of(tmp_path / "run/hf"), tensors_of(exploding))


def test_sampling_from_such_a_model_does_not_end_in_a_defect(exploding: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "cd"}])
    recipe = write_recipe(tmp_path / "r.yaml", exploding, rows, algorithm={"name": "grpo"})
    ended = here("train", recipe)
    assert ended.code in (0, 2), ended.err
    ended = here("generate", "--model", exploding, "--data", rows, "--out", tmp_path / "o", "--max-new-tokens", 3)
    assert ended.code in (0, 2), ended.err


def test_good_updates_say_nothing_of_skipping(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    assert here("train", write_recipe(tmp_path / "r.yaml", model, rows)).code == 0
    assert all("skipped" not in row for row in read_rows(tmp_path / "run/metrics.jsonl"))
