"""Rows that cannot be used are refused with file and line before any step, by every command, on every rank."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.program import (
    here,
    make_model,
    read_rows,
    refusal,
    refused_on,
    write_recipe,
    write_rows,
)

GOOD = {"input_ids": [1, 2], "prompt": "a", "completion": "b", "answer": 1}


@pytest.mark.parametrize("command", ["score", "generate", "sft", "grpo"])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{bad", "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: a list, not a JSON object"),
        ({}, "rows.jsonl:2: the row lacks"),
        (
            '{"prompt": "\\ud800", "completion": "b", "answer": 1}',
            "rows.jsonl:2: half of a surrogate pair",
        ),
        (
            {"prompt": 3, "completion": "b", "answer": 1},
            "rows.jsonl:2: prompt must be a string or messages",
        ),
        (
            {**GOOD, "more": json.loads("[" * 500 + "]" * 500)},
            "rows.jsonl:2: lists and objects inside each other more than 100",
        ),
    ],
)
def test_bad_rows(command: str, row: object, words: str, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD, row])
    for world in (1, 2) if row == "{bad" else (1,):
        assert words in refused_on(world, *asked(command, model, rows, tmp_path))
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["score", "generate", "sft", "grpo"])
def test_empty_and_absent_files(command: str, model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ["", ""])
    assert "rows.jsonl: no rows; the file needs at least one" in refused_on(
        1, *asked(command, model, rows, tmp_path)
    )
    rows.unlink()
    for world in (1, 2):
        told = refused_on(world, *asked(command, model, rows, tmp_path))
        assert "rows.jsonl: no such data file; give the path of a .jsonl or .parquet file" in told


@pytest.mark.parametrize("command", ["score", "generate"])
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            [5, 260],
            "rows.jsonl:2: token id 260 lies outside the model's vocabulary of 260 (0 to 259)",
        ),
        ([-1, 5], "rows.jsonl:2: token id -1 lies outside"),
        ([2**70], "rows.jsonl:2: token id 1180591620717411303424 lies outside"),
        ([], "rows.jsonl:2: the"),
        ([1.0], "rows.jsonl:2: input_ids must be a list of integers, not [1.0]"),
        ([True], "rows.jsonl:2: input_ids must be a list of integers"),
        ("12", "rows.jsonl:2: input_ids must be a list of integers"),
        (None, "rows.jsonl:2: input_ids must be a list of integers"),
    ],
)
def test_ids_outside_the_vocabulary(
    command: str, ids: object, words: str, model: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1]}, {"input_ids": ids}])
    for world in (1, 2) if ids == [-1, 5] else (1,):
        assert words in refused_on(world, *asked(command, model, rows, tmp_path))


def test_a_row_longer_than_the_budget_of_score(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1] * 4}, {"input_ids": [1] * 5}])
    argv = [*asked("score", model, rows, tmp_path), "--tokens-per-batch", 4]
    for world in (1, 2):
        told = refused_on(world, *argv)
        assert (
            "rows.jsonl:2: 5 tokens, but at most 4 fit; shorten the row, or raise --tokens-per-batch"
            in told
        )
    argv[-1] = 5
    assert here(*argv).code == 0
    told = refused_on(2, *argv, "--layout", "tp=2")
    assert "rows.jsonl:2: 5 tokens, but at most 4 fit" in told, (
        "with two ranks of tp, 5 tokens take 6 places"
    )


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_overlong_rows_of_train_follow_the_recipe(
    algorithm: str, model: Path, tmp_path: Path
) -> None:
    """SFT counts prompt, completion and EOS; RL counts the prompt and max_new_tokens (4)."""
    fits = {
        "sft": {"prompt": "abcd", "completion": "efg"},
        "grpo": {"prompt": "abcd", "answer": "x"},
    }[algorithm]
    long = {**fits, "prompt": "abcde", "id": "long"}
    rows = write_rows(tmp_path / "rows.jsonl", [fits, long, fits])
    changes: dict[str, Any] = {
        "algorithm": {"name": algorithm},
        "trainer": {"tokens_per_batch": 8, "steps": 1},
    }
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, **changes)
    told = refusal(here("train", recipe))
    kept = "rollout.max_new_tokens" in told
    assert "rows.jsonl:2: " in told
    assert (
        "5 tokens, but at most 4 fit" if algorithm == "grpo" else "9 tokens, but at most 8 fit"
    ) in told
    assert "raise trainer.tokens_per_batch, or set data.overlong_rows=drop" in told
    assert kept == (algorithm == "grpo")
    assert not (tmp_path / "run").exists()
    ended = here("train", recipe, "data.overlong_rows=drop", "trainer.prompts_per_step=3")
    assert ended.code == 0
    most = 4 if algorithm == "grpo" else 8
    note = f"note: data.overlong_rows=drop leaves out 1 of 3 rows of {rows}: they have more than {most} tokens\n"
    assert ended.out.count(note) == 1
    if algorithm == "grpo":
        assert {row["id"] for row in read_rows(tmp_path / "run/rollouts/step_000001.jsonl")} == {
            0,
            2,
        }
    told = refusal(
        here(
            "train",
            recipe,
            "data.overlong_rows=drop",
            "trainer.tokens_per_batch=5",
            f"run_dir={tmp_path}/b",
        )
    )
    assert "all 3 rows are longer than" in told
    if algorithm == "grpo":
        told = refusal(here("train", recipe, "trainer.tokens_per_batch=4", f"run_dir={tmp_path}/b"))
        assert (
            "trainer.tokens_per_batch=4 leaves no room for a prompt next to rollout.max_new_tokens=4"
            in told
        )


def asked(command: str, model: Path, rows: Path, folder: Path) -> list[object]:
    if command in ("score", "generate"):
        return [command, "--model", model, "--data", rows, "--out", folder / "out.jsonl"]
    return ["train", write_recipe(folder / "r.yaml", model, rows, algorithm={"name": command})]


@pytest.mark.parametrize("command", ["score", "generate", "sft", "grpo"])
def test_a_tokenizer_that_knows_more_ids_than_the_model(command: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", vocab_size=50)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "zzz", "completion": "b", "answer": 1}])
    told = refused_on(1, *asked(command, model, rows, tmp_path))
    assert "rows.jsonl:1: token id" in told
    assert (
        "lies outside the model's vocabulary of 50 (0 to 49); use this model's own tokenizer"
        in told
    )


@pytest.mark.parametrize(
    "commands",
    [
        ((1, "generate"), (1, "grpo"), (2, "sft")),
        pytest.param(((1, "score"), (1, "sft"), (2, "grpo")), marks=pytest.mark.soak),
    ],
)
def test_a_chat_template_that_fails(
    commands: tuple[tuple[int, str], ...], model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("\n{{ 1 // (messages | length - 1) }}")
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": "b", "answer": 1}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    for world, command in commands:
        told = refused_on(world, *asked(command, model, rows, tmp_path))
        cause = "ZeroDivisionError: integer division or modulo by zero (line 2 of the template)"
        assert told == f"{rows}:1: the chat template fails on these messages: {cause}\n"


@pytest.mark.parametrize("command", ["generate", "grpo"])
def test_stop_ids_that_are_no_ids(command: str, model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model, tmp_path / "model"))
    given = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**given, "eos_token_id": "3"}))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 1}])
    told = refused_on(1, *asked(command, model, rows, tmp_path))
    assert (
        "eos_token_id is '3'; expected an id below vocab_size=260, a list of them, or null" in told
    )


def test_a_run_dir_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows)
    for flags in ([], ["--dry-run"]):
        told = refused_on(1, "train", recipe, f"run_dir={rows}/run", *flags)
        assert "rows.jsonl is no directory that you may write to" in told
        assert "is not empty; choose another run_dir" in refused_on(
            1, "train", recipe, f"run_dir={rows}", *flags
        )
