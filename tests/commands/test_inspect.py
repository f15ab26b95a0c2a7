"""`dovetail inspect` of models and runs; of sharded checkpoints: test_convert.py."""

from pathlib import Path

from tests.helpers.parity_configs import moe_configs, save_tiny
from tests.helpers.program import here, make_model, write_recipe, write_rows


def test_a_model(model: Path, tmp_path: Path) -> None:
    ended = here("inspect", model)
    assert (ended.code, ended.err) == (0, "")
    for words in (
        "llama, run by the native engine",
        "layers",
        "260 words",
        "float32",
        "tokenizer.json",
    ):
        assert words in ended.out
    assert here("inspect", model, "--verify").out.startswith(ended.out)
    other = make_model(tmp_path / "short", tokenizer=False, max_position_embeddings=77)
    assert "positions   77\n" in here("inspect", other).out
    save_tiny(moe_configs()["mixtral"], tmp_path / "moe")
    assert "8 experts" in here("inspect", tmp_path / "moe").out


def test_a_run_while_it_goes_on_and_when_it_is_finished(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, trainer={"save_every": 1})
    assert here("train", recipe, "trainer.steps=1").code == 0
    shown = here("inspect", tmp_path / "run", "--verify").out
    for words in (
        "state       finished",
        "steps       1 of 1",
        "checkpoints step_000001",
        "loss",
        "sft",
        f"{model}",
    ):
        assert words in shown
    assert shown.endswith("verified: every piece matches its checksum\n")
    (tmp_path / "run/hf").rename(tmp_path / "gone")
    assert (
        "not finished; the same `dovetail train` command goes on"
        in here("inspect", tmp_path / "run").out
    )
