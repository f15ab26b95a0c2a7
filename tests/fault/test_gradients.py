"""A gradient that is not finite skips the update, on every rank, and the run goes on."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import assert_same_tensors, tensors_of
from tests.helpers.program import (
    here,
    make_model,
    on_ranks,
    read_rows,
    refusal,
    write_recipe,
    write_rows,
)


@pytest.fixture
def exploding(tmp_path: Path) -> Path:
    """A model whose logits overflow float32."""
    path = make_model(tmp_path / "exploding")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= 3e38
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("layout", ["tp=1", "tp=2", "dp=2"])
def test_skipped_updates_leave_the_weights_as_they_are(
    layout: str, exploding: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    recipe = write_recipe(tmp_path / "r.yaml", exploding, rows)
    if layout == "tp=1":
        ended = here("train", recipe)
        assert (ended.code, ended.err) == (0, "")
        assert "UPDATE SKIPPED: not finite: rank 0: loss" in ended.out
    else:
        assert {ended.code for ended in on_ranks(2, "train", recipe, "--layout", layout)} == {0}
    metrics = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["skipped"] for row in metrics] == [True, True]
    assert all(row["grad_norm"] is None for row in metrics), "JSON has no other word for it"
    assert_same_tensors(tensors_of(tmp_path / "run/hf"), tensors_of(exploding))


def test_numbers_that_are_not_finite_are_null_in_every_file(
    exploding: Path, tmp_path: Path
) -> None:
    """JSON has no word for them, so strict readers would refuse the whole file."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "cd"}])
    assert (
        here(
            "train", write_recipe(tmp_path / "r.yaml", exploding, rows, algorithm={"name": "grpo"})
        ).code
        == 0
    )
    argv = ["--model", exploding, "--data", rows, "--out", tmp_path / "generated"]
    assert here("generate", *argv, "--max-new-tokens", 3).code == 0
    ids = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6]}])
    assert (
        here("score", "--model", exploding, "--data", ids, "--out", tmp_path / "scored").code == 0
    )
    assert read_rows(tmp_path / "scored") == [{"id": 0, "log_probs": [None], "entropy": [None]}]
    for path in (
        tmp_path / "generated",
        *tmp_path.glob("run/rollouts/*"),
        tmp_path / "run/metrics.jsonl",
    ):
        text = path.read_text()
        assert "null" in text
        assert "NaN" not in text


def test_a_run_stops_after_as_many_skipped_updates_in_a_row_as_the_recipe_allows(
    exploding: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    recipe = write_recipe(
        tmp_path / "r.yaml", exploding, rows, trainer={"steps": 9, "max_skipped_steps": 2}
    )
    message = refusal(here("train", recipe))
    assert message.startswith("step 2: the updates of 2 steps in a row were skipped")
    assert "rank 0: loss" in message
    assert len(read_rows(tmp_path / "run/metrics.jsonl")) == 2
    kept = sorted(path.name for path in (tmp_path / "run/faults").iterdir())
    assert kept == ["step_000001.rank_0", "step_000002.rank_0"]


def test_good_updates_say_nothing_of_skipping(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    assert here("train", write_recipe(tmp_path / "r.yaml", model, rows)).code == 0
    assert all("skipped" not in row for row in read_rows(tmp_path / "run/metrics.jsonl"))
