"""Damaged and hostile model directories: every one is refused on all ranks, with what is wrong and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.program import here, make_model, refusal, refused_on, write_rows

IDS = [{"input_ids": [5, 6, 7]}]
RANKS = pytest.mark.parametrize("world", [1, 2])
Damage = Callable[[Path], object]


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture
def sharded_index(copy: Path) -> Path:
    """The model in two files with an index."""
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, copy / file, {"format": "pt"})
    where = {name: file for file, inside in files.items() for name in inside}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return copy


def score_refused(world: int, model: Path, tmp_path: Path, layout: str = "tp=2") -> str:
    data, out = write_rows(tmp_path / "rows.jsonl", IDS), tmp_path / "out.jsonl"
    flags = ["--layout", layout] if world > 1 else []
    message = refused_on(world, "score", "--model", model, "--data", data, "--out", out, *flags)
    assert not out.exists(), "nothing is written"
    return message


def change_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@RANKS
def test_missing_extra_and_misshaped_tensors_are_named_together(
    world: int, copy: Path, tmp_path: Path
) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.9.extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(65)
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int64)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    message = score_refused(world, copy, tmp_path)
    for said in (
        "missing: model.layers.1.mlp.up_proj.weight [96, 64]",
        "extra: model.layers.9.extra.weight [3]",
        "mis-shaped: model.norm.weight is [65], expected [64]",
        "wrong dtype: model.layers.0.input_layernorm.weight is torch.int64, expected one that converts to torch.float32",
    ):
        assert message.count(said) == 1, said


def cut(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-10])


def cut_header(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:100])


def garble(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:8] + b"x" + whole[9:])


def no_json(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama"')


def link_out(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "weights")
    (model / "model.safetensors").symlink_to(model.parent / "weights")


def link_side(model: Path) -> None:
    (model / "vocab.txt").symlink_to("/etc/hostname")


def only_pickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


@RANKS
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            cut,
            [
                "model.safetensors is cut, corrupt or",
                "file not fully covered; fetch or write it again",
            ],
        ),
        (
            cut_header,
            ["model.safetensors is cut, corrupt or no safetensors", "invalid header length"],
        ),
        (
            garble,
            [
                "model.safetensors is cut, corrupt or",
                "invalid JSON in header",
                "fetch or write it again",
            ],
        ),
        (no_json, ["config.json is not valid JSON", "fetch or write it again"]),
        (
            link_out,
            ["model.safetensors is a link to", "outside the directory; copy the file into it"],
        ),
        (link_side, ["vocab.txt is a link to /etc/hostname, outside the directory"]),
        (
            only_pickled,
            ["only pickled weights (pytorch_model.bin)", "save_pretrained(NEW) writes safetensors"],
        ),
        (
            no_weights,
            ["has no weights: expected model.safetensors or model.safetensors.index.json"],
        ),
        (no_config, ["has no config.json; give a directory that transformers can load"]),
    ],
)
def test_damaged_files(
    world: int, damage: Damage, words: list[str], copy: Path, tmp_path: Path
) -> None:
    damage(copy)
    message = score_refused(world, copy, tmp_path)
    for said in words:
        assert said in message, message


def in_index(model: Path, file: str) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "../b.safetensors",
            "names the file '../b.safetensors', which is not inside the directory; correct its index",
        ),
        (
            "/etc/x.safetensors",
            "names the file '/etc/x.safetensors', which is not inside the directory",
        ),
        ("sub\\..\\b.safetensors", "which is not inside the directory"),
        ("c.safetensors", "c.safetensors does not exist; fetch the checkpoint again"),
        ("b.bin", "names files that are not safetensors"),
        ("linked.safetensors", "is a link to"),
        ("b.safetensors", "model.norm.weight: b.safetensors does not hold it"),
    ],
)
def test_index_entries(file: str, words: str, sharded_index: Path, tmp_path: Path) -> None:
    shutil.copy(sharded_index / "a.safetensors", tmp_path / "b.safetensors")
    (sharded_index / "linked.safetensors").symlink_to(tmp_path / "b.safetensors")
    held = json.loads((sharded_index / "model.safetensors.index.json").read_text())["weight_map"]
    if file == "b.safetensors" and held["model.norm.weight"] == file:
        file, words = "a.safetensors", words.replace("b.safetensors", "a.safetensors")
    in_index(sharded_index, file)
    for world in (1, 2):
        assert words in score_refused(world, sharded_index, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type is None; known families:"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            "rope_type",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "odd": 1}}, "odd"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": "260"}, "vocab_size"),
        ({"head_dim": 7}, "rotated channels"),
    ],
)
def test_families_and_options_that_are_not_computed(
    changes: dict[str, object], words: str, copy: Path, tmp_path: Path
) -> None:
    change_config(copy, **changes)
    messages = {score_refused(world, copy, tmp_path) for world in (1, 2)}
    assert len(messages) == 1
    assert words in messages.pop()


def test_a_family_that_neither_engine_runs(copy: Path, tmp_path: Path) -> None:
    change_config(copy, model_type="mamba")
    for world in (1, 2):
        told = score_refused(world, copy, tmp_path)
        assert "model_type is 'mamba'; known families: apertus, deepseek_v2, " in told


def test_damage_stops_train_generate_and_convert_too(copy: Path, tmp_path: Path) -> None:
    cut(copy)
    rows = write_rows(tmp_path / "rows.jsonl", IDS)
    told = [
        refusal(here("generate", "--model", copy, "--data", rows, "--out", tmp_path / "o")),
        refusal(here("convert", copy, tmp_path / "cut", "--to", "sharded")),
        refusal(here("convert", copy, tmp_path / "back", "--to", "hf")),
    ]
    assert all("file not fully covered; fetch or write it again" in message for message in told), (
        told
    )
    assert {path.name for path in tmp_path.iterdir()} == {"model", "rows.jsonl"}, (
        "nothing was left behind"
    )


def test_a_damaged_file_that_one_rank_alone_sees_stops_both(copy: Path, tmp_path: Path) -> None:
    """Ranks verify different pieces of a sharded checkpoint, so only one of them meets the damage."""
    here("convert", copy, tmp_path / "cut", "--to", "sharded", "--layout", "tp=1")
    piece = next((tmp_path / "cut").glob("pieces-*"))
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    message = score_refused(2, tmp_path / "cut", tmp_path)
    assert "is damaged; use an older checkpoint or another copy" in message
    assert "does not match its checksum" in message


def test_what_is_no_model_at_all(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", IDS)
    for given, words in {
        str(tmp_path / "absent"): "absent is not a directory",
        str(rows): "rows.jsonl is not a directory",
        "org/name": "org/name is not a directory; for a hub model, pin it to a commit: org/name@COMMIT",
    }.items():
        for world in (1, 2):
            flags = ["--layout", "dp=2"] if world > 1 else []
            told = refused_on(
                world, "score", "--model", given, "--data", rows, "--out", tmp_path / "o", *flags
            )
            assert words in told


def test_a_head_that_is_not_there(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", IDS)
    for world in (1, 2):
        flags = ["--layout", "tp=2"] if world > 1 else []
        told = refused_on(
            world,
            "score",
            "--model",
            model,
            "--data",
            rows,
            "--out",
            tmp_path / "o",
            "--head",
            "value",
            *flags,
        )
        assert "has no value head: expected one of score.weight" in told
        assert "give a reward or value model, or --head lm" in told


def test_a_model_without_tokenizer_refuses_text(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tokenizer=False)
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"input_ids": [5]}, {"prompt": "a", "completion": "b"}]
    )
    for world in (1, 2):
        flags = ["--layout", "tp=2"] if world > 1 else []
        told = refused_on(
            world, "score", "--model", model, "--data", rows, "--out", tmp_path / "o", *flags
        )
        assert "has no tokenizer (tokenizer.json); give rows of input_ids, or copy it there" in told


@pytest.mark.parametrize("text", ['{"not": "a tokenizer"}', "{", ""])
def test_a_broken_tokenizer_is_refused(text: str, copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").write_text(text)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    told = refused_on(1, "score", "--model", copy, "--data", rows, "--out", tmp_path / "o")
    assert "its tokenizer does not load" in told


def test_weights_that_are_not_finite_are_scored_and_told_of(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    rows, out = (
        write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 8]}, *IDS]),
        tmp_path / "out.jsonl",
    )
    ended = here("score", "--model", copy, "--data", rows, "--out", out)
    assert ended.code == 0, ended
    assert f"1 of 2 rows of {out} hold numbers that are not finite, written as null" in ended.err
    clean, odd = (json.loads(line)["entropy"] for line in out.read_text().splitlines())
    assert None not in clean
    assert odd[1] is None
