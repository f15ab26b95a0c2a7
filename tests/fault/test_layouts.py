"""Degrees that cannot divide, or that this release does not cut by, are refused on all ranks with both numbers."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.program import make_model, refused_on, write_recipe, write_rows

ROWS = [{"input_ids": [5, 6, 7]}]


def told_by(world: int, layout: str, model: Path, folder: Path, command: str = "score") -> str:
    data = write_rows(folder / "rows.jsonl", ROWS)
    return refused_on(
        world, command, "--model", model, "--data", data, "--out", folder / "o", "--layout", layout
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=2,dp=2", "layout tp=2,dp=2 needs 4 ranks (tp x pp x cp x dp), but the job has 2"),
        (
            "tp=4",
            "layout tp=4,dp=auto needs a multiple of 4 ranks, but the job has 2; change the degrees",
        ),
        ("dp=2,ep=3", "layout dp=2,ep=3: ep=3 does not divide dp x cp = 2"),
        ("dp=2,ep=2", "ep=2 cuts experts, and this llama model has none; set ep=1"),
        ("tp=0", "layout 'tp=0': tp must be a whole number of 1 or more, not '0'"),
        ("tp=-2", "tp must be a whole number of 1 or more, not '-2'"),
        ("tp", "'tp' is not one of tp=N, pp=N, cp=N, dp=N, ep=N"),
        ("zz=2", "'zz=2' is not one of tp=N"),
        ("copy_engines=true", "'copy_engines=true' is not one of tp=N"),
    ],
)
@pytest.mark.parametrize("command", ["score", "generate"])
def test_degrees(command: str, layout: str, words: str, model: Path, tmp_path: Path) -> None:
    assert words in told_by(2, layout, model, tmp_path, command)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "3 attention heads are not a multiple",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            "3 key-value heads are neither",
        ),
    ],
)
def test_tensor_parallel_degrees_that_do_not_divide_the_model(
    sizes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", head_dim=16, **sizes)
    message = told_by(2, "tp=2", model, tmp_path)
    assert words in message
    assert "use one of tp=1" in message
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        write_rows(tmp_path / "s.jsonl", [{"prompt": "a", "completion": "b"}]),
    )
    assert words in refused_on(2, "train", recipe, "--layout", "tp=2")
    assert words in refused_on(
        2, "convert", model, tmp_path / "cut", "--to", "sharded", "--layout", "tp=2"
    )


def test_a_vocabulary_need_not_divide(tmp_path: Path) -> None:
    """263 words over two ranks: the last rank's rows are padded."""
    odd = make_model(tmp_path / "model", vocab_size=263)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [262, 263]}])
    argv = ["score", "--model", odd, "--data", data, "--out", tmp_path / "o", "--layout", "tp=2"]
    assert "token id 263 lies outside the model's vocabulary of 263 (0 to 262)" in refused_on(
        2, *argv
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("pp=4", "pp=4 x virtual_stages=1 makes 4 stages, but the model has 2 layers; use pp=2"),
        ("tp=4", "14 attention heads are not a multiple of 4; use one of tp=1, 2"),
    ],
)
def test_what_cannot_be_cut_names_the_nearest_that_can(
    layout: str, words: str, tmp_path: Path
) -> None:
    """Before any weight is read: there are none."""
    model = make_model(
        tmp_path / "model",
        num_attention_heads=14,
        num_key_value_heads=2,
        hidden_size=56,
        head_dim=4,
        intermediate_size=32,
    )
    (model / "model.safetensors").write_bytes(b"not weights")
    told = told_by(4, layout, model, tmp_path)
    assert words in told, told


@pytest.mark.parametrize(
    ("world", "sections", "words"),
    [
        (
            2,
            {"layout": {"pp": 2, "schedule": "interleaved"}},
            "schedule=interleaved needs several stages a rank",
        ),
        (
            2,
            {"layout": {"pp": 2, "virtual_stages": 2}},
            "but the model has 2 layers; use pp=2, virtual_stages=1",
        ),
        (
            2,
            {"layout": {"pp": 2, "pp_split": [2, 1]}},
            "it adds up to 3, but the model has 2 layers; use for example",
        ),
        (
            2,
            {"layout": {"pp": 2, "pp_split": [2]}},
            "it has 1 numbers for 2 stages (pp x virtual_stages)",
        ),
        (
            2,
            {"layout": {"dp": 2, "schedule": "gpipe"}},
            "say how to cut by pp; leave them out at pp=1",
        ),
        (
            2,
            {"layout": {"dp": 2, "cp_mode": "gather"}},
            "cp_mode=gather says how to cut by cp; leave it out at cp=1",
        ),
        (
            3,
            {"layout": {"cp": 3, "cp_mode": "ulysses"}},
            "heads can be exchanged over 1 of cp=3 ranks; use cp_mode",
        ),
        (
            3,
            {"layout": {"cp": 3}, "critic": {"layout": {"pp": 3}}},
            "critic.layout: layout pp=3: pp=3 x virtual",
        ),
        (
            3,
            {"layout": {"cp": 3}, "reference": {"layout": {"tp": 3}}},
            "reference.layout: layout tp=3: tp=3 does",
        ),
        (
            3,
            {"layout": {"cp": 3}, "rollout": {"layout": {"pp": 3}}},
            "rollout.layout: layout pp=3: pp=3 x virtual",
        ),
        (
            2,
            {"layout": {"cp": 2}, "rollout": {"layout": {"pp": 4}}},
            "rollout.layout: layout pp=4,dp=auto needs a mu",
        ),
    ],
)
def test_a_recipe_that_cannot_be_cut_is_refused_before_any_weight_is_read(
    world: int, sections: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Whichever model of the job it is. There are no weights, and nothing is written."""
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not weights")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}])
    algorithm = {"name": "ppo", "kl_coef": 0.1}
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, algorithm=algorithm, **sections)
    told = refused_on(world, "train", recipe)
    assert words in told, told
    assert not (tmp_path / "run").exists()
