"""Several parts of rows: one behind the other, or mixed by weight; and steps by epochs."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dovetail.data.examples import Limits, load_prompts
from dovetail.data.rows import BLOCK, mixed_rows
from dovetail.errors import ConfigError, DataError
from dovetail.factory.dataset import load_parts, with_epochs
from dovetail.factory.rows import reads_answer
from dovetail.recipe.data import DataSection
from dovetail.recipe.reward import RewardSection
from dovetail.recipe.schema import make_recipe
from dovetail.rl.collect import step_rows
from tests.helpers.tokenizers import PLAIN

PARTS = ((7, 3.0), (5, 1.0))  # rows and weight


def test_parts_have_their_share_of_every_block_and_their_rows_are_taken_alike() -> None:
    rows = mixed_rows(PARTS, BLOCK, 3, 0)
    first = [row for row in rows if row < 7]
    assert len(first) == BLOCK * 3 // 4 and max(rows) == 11
    assert set(Counter(first[: 7 * 100]).values()) == {100}, "whole epochs of the part"
    assert first[:7] != first[7:14], "each in another order"


@pytest.mark.parametrize("seed", [0, None])
def test_a_mixture_is_a_function_of_its_position(seed: int | None) -> None:
    whole = mixed_rows(PARTS, 60, seed, BLOCK - 30)
    pieces = [
        row
        for start in range(BLOCK - 30, BLOCK + 30, 4)
        for row in mixed_rows(PARTS, 4, seed, start)
    ]
    assert pieces == whole
    if seed is None:
        assert [row for row in mixed_rows(PARTS, 40, seed, 0) if row < 7][:9] == [
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            0,
            1,
        ]
    else:
        assert whole != mixed_rows(PARTS, 60, 1, BLOCK - 30)


def test_a_small_weight_is_not_lost() -> None:
    assert 4 in mixed_rows(((4, 1.0), (1, 1e-9)), BLOCK, 0, 0)


def load(data: dict[str, Any]) -> Any:
    section = DataSection(**data)
    loader = partial(load_prompts, tokenizer=PLAIN, limits=Limits(260))
    return load_parts(section, section.train, loader)


def test_parts_are_read_by_their_own_formats_and_columns(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(json.dumps({"problem": "1+1=", "target": "2"}))
    b.write_text('{"prompt": "0", "label": 0}\n{"prompt": "1", "label": 1, "id": "own"}')
    columns = {"prompt": "problem", "answer": "target"}
    mixture = [
        {"path": str(a), "weight": 2.0, "columns": columns},
        {"path": str(b), "weight": 1.0, "format": "slime"},
    ]
    rows, parts = load({"train": mixture})
    assert [(row.id, row.answer) for row in rows] == [(f"{a}:0", "2"), (f"{b}:0", 0), ("own", 1)]
    assert parts == ((1, 2.0), (2, 1.0))
    listed, none = load({"train": [str(b), str(b)]})
    assert (len(listed), none) == (4, ())


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([{"path": "a", "weight": 1.0}, "b"], "data.train: some parts have a weight"),
        ([{"path": "a", "wieght": 1.0}], r"data.train: wieght is 1.0: .* \(keys: path, weight"),
        ([3], "data.train: a part is 3: "),
        ([{"weight": 1.0}], "data.train: path is .*required"),
        ([], r"data.train: \[\] is no path, and no list of paths"),
        ({"path": "a"}, "data.train: .* is no path, and no list"),
        ([{"path": "a", "weight": -1.0}], "data.train: weight is -1.0: .*greater than 0"),
    ],
)
def test_mistakes_in_parts_get_one_message(train: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_recipe({"model": {"path": "m"}, "data": {"train": train}, "run_dir": "r"})


def test_steps_by_epochs_and_steps_of_a_mixture() -> None:
    trainer = {"prompts_per_step": 4, "seed": 1}
    recipe = make_recipe(
        {
            "model": {"path": "m"},
            "data": {"train": "x", "epochs": 3},
            "run_dir": "r",
            "trainer": trainer,
        }
    )
    assert with_epochs(recipe, 10).trainer.steps == 8
    assert step_rows(recipe, 12, 2, 0, PARTS) == mixed_rows(PARTS, 4, 1, 8)


def test_a_label_is_needed_where_a_reward_reads_it(tmp_path: Path) -> None:
    assert [
        reads_answer(RewardSection(name=name))
        for name in ("exact_match", "numeric_match", "format")
    ] == [
        True,
        True,
        False,
    ]
    assert not reads_answer(RewardSection(**{"import": "mine:score"}))  # type: ignore[arg-type]  # by its alias
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": null}')
    assert (
        load_prompts(tmp_path / "rows.jsonl", PLAIN, Limits(260), answers=False)[0].answer is None
    )
    with pytest.raises(
        DataError, match=r"jsonl:1: answer is null, which no reward can compare with"
    ):
        load_prompts(tmp_path / "rows.jsonl", PLAIN, Limits(260))
