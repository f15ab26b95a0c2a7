"""Commands on layouts with pp and cp: the numbers, ids and bytes of one rank."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.checkpoint.reader import ShardedReader
from tests.helpers.checkpoints import digests
from tests.helpers.parity_configs import tiny_configs, tiny_model
from tests.helpers.program import (
    Ended,
    here,
    make_model,
    on_ranks,
    program,
    read_rows,
    refused_on,
    write_rows,
)
from tests.helpers.tolerances import MODEL_FP32

DEPTH = 5
ROWS: Sequence[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "id": "first"},
    {"input_ids": [9]},
    {"input_ids": list(range(40, 77))},
    {"input_ids": [11, 3]},
    {"input_ids": [*range(100, 120)]},
]
EIGHT = "tp=2,pp=2,cp=2"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model, tied ones that list one name or both, and a critic."""
    folder = tmp_path_factory.mktemp("pipelines")
    sizes: dict[str, Any] = {"num_hidden_layers": DEPTH, "num_key_value_heads": 4}
    found = {"lm": make_model(folder / "lm", **sizes)}
    for name, kept in (("tied", [TABLE]), ("tied_head", [HEAD]), ("tied_both", [TABLE, HEAD])):
        found[name] = make_model(
            folder / name, dtype=torch.bfloat16, tie_word_embeddings=True, **sizes
        )
        tensors = load_file(found[name] / "model.safetensors")
        table = tensors.pop(TABLE)
        tensors |= {listed: table.clone() for listed in kept}
        save_file(tensors, found[name] / "model.safetensors", {"format": "pt"})
    config = tiny_configs()["llama"]
    config.update({"vocab_size": 260, **sizes})
    tiny_model(config, values=True).save_pretrained(folder / "value")
    return {**found, "value": folder / "value"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def ranks_of(layout: str) -> int:
    degrees = [int(part.partition("=")[2]) for part in layout.split(",")]
    return int(torch.tensor(degrees).prod())


def agree(world: int, *argv: object) -> None:
    assert {each.well for each in on_ranks(world, *argv)} == {True}


def assert_same_numbers(out: Path, expected: Path) -> None:
    """By the rule of the contract."""
    for ours, one in zip(read_rows(out), read_rows(expected), strict=True):
        assert ours.keys() == one.keys()
        assert ours["id"] == one["id"]
        for key in one.keys() - {"id"}:
            assert all(
                abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))
                for a, b in zip(ours[key], one[key], strict=True)
            ), key


@pytest.mark.parametrize(
    ("head", "layout", "flags"),
    [
        ("lm", "tp=2,cp=2", ["--tokens-per-batch", 48, "--temperature", 0.7]),
        ("value", "pp=4", []),
        ("lm", "pp=2,dp=2", ["--tokens-per-batch", 40]),
        ("value", "cp=4", []),
        pytest.param("lm", EIGHT, [], marks=pytest.mark.soak),
        pytest.param(
            "lm", EIGHT, ["--tokens-per-batch", 48, "--temperature", 0.7], marks=pytest.mark.soak
        ),
        pytest.param("value", EIGHT, [], marks=pytest.mark.soak),
        pytest.param(
            "value", EIGHT, ["--tokens-per-batch", 48, "--temperature", 0.7], marks=pytest.mark.soak
        ),
        pytest.param("lm", "pp=4", [], marks=pytest.mark.soak),
        pytest.param("value", "pp=2,dp=2", ["--tokens-per-batch", 40], marks=pytest.mark.soak),
        pytest.param("lm", "cp=4", [], marks=pytest.mark.soak),
    ],
)
def test_scores_are_those_of_one_rank(
    head: str, layout: str, flags: list[object], models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    argv = ["score", "--model", models[head], "--data", data, "--head", head, *flags]
    assert here(*argv, "--out", tmp_path / "one").well
    agree(ranks_of(layout), *argv, "--out", tmp_path / "cut", "--layout", layout)
    assert_same_numbers(tmp_path / "cut", tmp_path / "one")


@pytest.mark.soak
@pytest.mark.parametrize("head", ["lm", "value"])
def test_scores_of_the_program(
    head: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """On eight ranks that it starts itself."""
    argv = ["score", "--model", models[head], "--data", data, "--head", head]
    assert program(*argv, "--out", tmp_path / "one").well
    assert program(*argv, "--out", tmp_path / "cut", "--layout", EIGHT).well
    assert_same_numbers(tmp_path / "cut", tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            *each, marks=[pytest.mark.soak] * (each not in (("lm", "cp=2"), ("tied", "pp=2")))
        )
        for each in product(("lm", "tied"), ("pp=2", "cp=2", EIGHT))
    ],
)
def test_samples_are_those_of_one_rank(
    name: str, layout: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    argv = [
        "generate",
        "--model",
        models[name],
        "--data",
        data,
        "--samples",
        3,
        "--max-new-tokens",
        6,
        "--seed",
        4,
    ]
    assert here(*argv, "--out", tmp_path / "one").well
    agree(ranks_of(layout), *argv, "--out", tmp_path / "cut", "--layout", layout)
    for ours, one in zip(read_rows(tmp_path / "cut"), read_rows(tmp_path / "one"), strict=True):
        pairs = zip(ours.pop("log_probs"), one.pop("log_probs"), strict=True)
        assert ours == one
        assert all(abs(a - b) <= MODEL_FP32 * max(1.0, abs(b)) for a, b in pairs)


CUT_QUICKLY = (
    *(
        ("tied_both", "pp=4"),
        ("lm", "pp=2,cp=2"),
        ("tied", "pp=2,cp=2"),
        ("tied_head", "tp=2,pp=2"),
        ("value", "pp=4"),
    ),
)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*each, marks=[pytest.mark.soak] * (each not in CUT_QUICKLY))
        for each in product(
            ("lm", "tied", "tied_head", "tied_both", "value"), ("tp=2,pp=2", "pp=4", "pp=2,cp=2")
        )
    ],
)
def test_cut_and_rejoined_byte_for_byte(
    name: str, layout: str, models: dict[str, Path], tmp_path: Path
) -> None:
    cut, back = tmp_path / "cut", tmp_path / "back"
    agree(4, "convert", models[name], cut, "--to", "sharded", "--layout", layout)
    ended = here("inspect", cut, "--verify")
    assert (ended.code, ended.err) == (0, "")
    assert ",".join(layout_line(layout)) in ended.out
    assert ended.out.endswith("verified: every piece matches its checksum\n")
    assert here("convert", cut, back, "--to", "hf").well
    assert digests(back) == digests(models[name]), "every file, byte for byte"
    again = tmp_path / "again"
    agree(4, "convert", cut, again, "--to", "hf", "--layout", "pp=2,dp=2")
    assert digests(again) == digests(models[name])


def layout_line(layout: str) -> list[str]:
    given = dict(part.split("=") for part in layout.split(","))
    return [f"{name}={given.get(name, 1)}" for name in ("tp", "pp", "cp", "dp", "ep")]


@pytest.mark.parametrize("name", ["lm", "tied_both"])
def test_a_pipeline_rank_writes_its_own_layers(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """And what lies at the ends: a tied table is written once, by the first."""
    agree(4, "convert", models[name], tmp_path / "cut", "--to", "sharded", "--layout", "pp=4")
    stages: list[set[str]] = [set() for _ in range(4)]
    for tensor, stored in ShardedReader(tmp_path / "cut").manifest.tensors.items():
        (region,) = stored.regions
        stages[int(region.file.split("-")[1])].add(tensor)
    layers = [
        {int(tensor.split(".")[2]) for tensor in held if ".layers." in tensor} for held in stages
    ]
    assert [layer for held in layers for layer in sorted(held)] == list(range(DEPTH))
    rest = [{tensor for tensor in held if ".layers." not in tensor} for held in stages]
    ends = (
        ({TABLE}, {HEAD, "model.norm.weight"})
        if name == "lm"
        else ({TABLE, HEAD}, {"model.norm.weight"})
    )
    assert rest == [ends[0], set(), set(), ends[1]]


READERS = ("tp=4", "pp=4", "tp=2,pp=2")


@pytest.mark.parametrize(
    ("head", "name", "layouts"),
    [
        ("lm", "tied", READERS[:2]),
        ("value", "value", READERS[2:]),
        *(
            pytest.param(*each, READERS, marks=pytest.mark.soak)
            for each in (("lm", "lm"), ("value", "value"))
        ),
    ],
)
def test_what_one_layout_cut_another_reads(
    head: str,
    name: str,
    layouts: tuple[str, ...],
    models: dict[str, Path],
    data: Path,
    tmp_path: Path,
) -> None:
    argv = ["--data", data, "--head", head]
    assert here("score", "--model", models[name], *argv, "--out", tmp_path / "one").well
    agree(4, "convert", models[name], tmp_path / "cut", "--to", "sharded", "--layout", "pp=2,cp=2")
    for layout in layouts:
        agree(
            4,
            "score",
            "--model",
            tmp_path / "cut",
            *argv,
            "--out",
            tmp_path / layout,
            "--layout",
            layout,
        )
        assert_same_numbers(tmp_path / layout, tmp_path / "one")
    assert here("score", "--model", tmp_path / "cut", *argv, "--out", tmp_path / "again").well
    assert read_rows(tmp_path / "again") == read_rows(tmp_path / "one")


UNCUT = {
    "pp=6": "makes 6 stages, but the model has 5 layers; use pp=5",
    "tp=3,cp=2": "8 attention heads are not a multiple of 3",
    "cp=2,ep=2": "ep=2 cuts experts, and this llama model has none",
}
REFUSING = ("convert", "score", "generate")


@pytest.mark.parametrize(
    ("command", "layout", "words"),
    [
        pytest.param(command, layout, words, marks=[pytest.mark.soak] * (i != j))
        for i, command in enumerate(REFUSING)
        for j, (layout, words) in enumerate(UNCUT.items())
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_written(
    command: str, layout: str, words: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    files = (
        [models["lm"], out, "--to", "sharded"]
        if command == "convert"
        else ["--model", models["lm"]]
    )
    if command != "convert":
        files += ["--data", data, "--out", out]
    world = 2 if "ep" in layout else 6
    assert words in refused_on(world, command, *files, "--layout", layout)
    assert not list(tmp_path.iterdir())


def test_a_pipeline_that_the_sampler_cannot_run_is_refused(tmp_path: Path) -> None:
    """It folds pp into tp: five layers can be cut by 2, five heads cannot."""
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "head_dim": 8}
    sizes: dict[str, Any] = {**heads, "num_hidden_layers": DEPTH}
    model = make_model(tmp_path / "model", **sizes)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    argv = ["--model", model, "--data", rows, "--out", tmp_path / "o", "--layout", "pp=2"]
    told = refused_on(2, "generate", *argv)
    assert "layout pp=2: the sampler runs pipeline ranks as tp=2; " in told
    assert "5 attention heads are not a multiple of 2" in told
    ended: list[Ended] = on_ranks(2, "score", *argv)
    assert {each.well for each in ended} == {True}
