"""`dovetail train` on rows of other projects, from a mixture, by epochs."""

import json
from pathlib import Path

from tests.helpers.program import here, on_ranks, read_rows, write_recipe, write_rows


def test_rows_of_others_are_trained_by_epochs_from_a_mixture(model: Path, tmp_path: Path) -> None:
    """verl's as a JSON array and slime's, in a mixture, and a run that goes on with the next epoch."""
    chat = {"prompt": "ab", "reward_model": {"ground_truth": "c"}}
    (tmp_path / "verl.json").write_text(json.dumps([chat] * 3))
    write_rows(tmp_path / "slime.jsonl", [{"prompt": "hi", "label": "h"}])
    mixture = [
        {"path": str(tmp_path / name), "weight": 0.5} for name in ("verl.json", "slime.jsonl")
    ]
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    data = {"train": mixture, "epochs": 1, "max_prompt_length": 1, "truncate": "left"}
    data |= {"apply_chat_template": True, "chat_template": str(tmp_path / "chat.jinja")}
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        tmp_path,
        algorithm={"name": "grpo"},
        data=data,
        trainer={"save_every": 1},
    )
    ended = here("train", recipe)
    assert (ended.code, ended.err) == (0, "")
    assert "rows of " + str(tmp_path / "verl.json") + " are read as verl's" in ended.out.replace(
        "\n", " "
    )
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run/hf/chat_template.jinja").read_text() == (
        tmp_path / "chat.jinja"
    ).read_text()
    again = here("train", recipe)
    assert again.code == 0 and "finished" in again.out + again.err
    assert here("train", recipe, "data.epochs=2").code == 0
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    evaluated = here("eval", model, "--data", tmp_path / "verl.json", "--max-new-tokens", 1)
    line = "dovetail: note: rows of {} are read as {}'s\n"
    assert (evaluated.code, evaluated.err) == (0, line.format(tmp_path / "verl.json", "verl"))
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    rows = write_rows(tmp_path / "shared.jsonl", [shared])
    scored = here("score", "--model", model, "--data", rows, "--out", tmp_path / "out.jsonl")
    assert (scored.code, scored.err) == (0, line.format(rows, "ShareGPT"))


def test_odd_rows_are_noted_under_torchrun(model: Path, tmp_path: Path) -> None:
    """Its ranks run when the command begins; the first of them tells what is odd."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": turns, "answer": "c"}])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, algorithm={"name": "grpo"})
    first, second = on_ranks(2, "train", recipe, "--layout", "dp=2", "trainer.steps=1")
    assert (first.code, second.code) == (0, 0)
    noted = f"dovetail: note: {rows}:1: the prompt ends with a turn of the assistant"
    assert first.err.count(noted) == 1 and noted not in second.err
