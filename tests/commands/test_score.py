"""`dovetail score`: row forms, the output's keys and order, and numbers that no packing or layout changes."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.parity_configs import tiny_configs, tiny_model
from tests.helpers.program import here, on_ranks, read_rows, refusal, write_rows
from tests.helpers.tokenizers import make_tokenizer
from tests.helpers.tolerances import MODEL_FP32

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "id": "first"},
    {"input_ids": [9]},
    {"prompt": "ab", "completion": "cd", "id": {"any": "JSON"}},
    {"prompt": [{"role": "user", "content": "hi"}], "completion": "ok"},
    {"input_ids": [5, 6, 7, 8, 9, 10, 11]},
]


@pytest.fixture(scope="module")
def scored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("score")
    out = folder / "new" / "out.jsonl"
    ended = here(
        "score", "--model", model, "--data", write_rows(folder / "rows.jsonl", ROWS), "--out", out
    )
    assert ended.well
    return read_rows(out)


def ids_of_rows() -> list[list[int]]:
    tokenizer = make_tokenizer()
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok"
    texts = {2: "abcd", 3: chat}
    return [
        tokenizer.encode(texts[i], add_special_tokens=False)
        if i in texts
        else list(row["input_ids"])
        for i, row in enumerate(ROWS)
    ]


def test_one_row_for_each_row_in_order_with_its_id(scored: list[dict[str, object]]) -> None:
    assert [row["id"] for row in scored] == ["first", 1, {"any": "JSON"}, 3, 4]
    assert all(list(row) == ["id", "log_probs", "entropy"] for row in scored)
    lengths = [len(ids) - 1 for ids in ids_of_rows()]
    assert [len(row["log_probs"]) for row in scored] == lengths  # type: ignore[arg-type]
    assert [len(row["entropy"]) for row in scored] == lengths  # type: ignore[arg-type]
    assert lengths[1] == 0, "a row of one token has nothing to score"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_numbers_are_those_of_transformers(temperature: float, model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    out = tmp_path / "out.jsonl"
    assert (
        here(
            "score", "--model", model, "--data", data, "--out", out, "--temperature", temperature
        ).code
        == 0
    )
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, row in zip(ids_of_rows(), read_rows(out), strict=True):
        with torch.no_grad():
            logp = torch.log_softmax(peer(torch.tensor([ids])).logits[0] / temperature, -1)
        expected = (
            logp[:-1].gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].tolist()
        )
        entropy = (-(logp.exp() * logp).sum(-1))[:-1].tolist()
        for a, b in zip(row["log_probs"] + row["entropy"], expected + entropy, strict=True):
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


@pytest.mark.parametrize(
    "flags",
    [
        ["--layout", "tp=2"],
        pytest.param(["--layout", "dp=2"], marks=pytest.mark.soak),
        ["--tokens-per-batch", "26"],
        [],
    ],
)
def test_no_layout_or_batch_size_changes_a_number(
    flags: list[str], model: Path, scored: list[dict[str, list[float]]], tmp_path: Path
) -> None:
    """Without a named dp two ranks of a launcher are dp=2."""
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    ended = on_ranks(2, "score", "--model", model, "--data", data, "--out", out, *flags)
    assert {each.well for each in ended} == {True}
    for ours, one in zip(read_rows(out), scored, strict=True):
        assert ours["id"] == one["id"]
        for key in ("log_probs", "entropy"):
            assert all(
                abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))
                for a, b in zip(ours[key], one[key], strict=True)
            )


@pytest.mark.parametrize("head", ["score.weight", "v_head.summary.weight", "lm_head.weight"])
def test_values(head: str, tmp_path: Path) -> None:
    config = tiny_configs()["llama"]
    peer = tiny_model(config, values=True)
    peer.save_pretrained(tmp_path / "model")
    rename(
        tmp_path / "model" / "model.safetensors",
        {"score.weight": head, "score.bias": head.replace("weight", "bias")},
    )
    data, out = (
        write_rows(
            tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}, {"input_ids": [9], "id": 7}]
        ),
        "out.jsonl",
    )
    ended = here(
        "score",
        "--model",
        tmp_path / "model",
        "--data",
        data,
        "--out",
        tmp_path / out,
        "--head",
        "value",
    )
    assert ended.well
    for row, (ids, name) in zip(read_rows(tmp_path / out), [([5, 6, 7], 0), ([9], 7)], strict=True):
        assert list(row) == ["id", "values"]
        assert row["id"] == name
        with torch.no_grad():
            expected = peer(torch.tensor([ids])).logits[0, :, 0].tolist()
        assert all(
            abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))
            for a, b in zip(row["values"], expected, strict=True)
        )


def rename(file: Path, names: dict[str, str]) -> None:
    tensors = load_file(file)
    save_file(
        {names.get(name, name): tensor for name, tensor in tensors.items()}, file, {"format": "pt"}
    )


def test_bfloat16_holds_weights_in_bfloat16_and_stays_near(
    model: Path, scored: list[dict[str, list[float]]], tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    assert (
        here("score", "--model", model, "--data", data, "--out", out, "--dtype", "bfloat16").code
        == 0
    )
    differences = [
        abs(a - b)
        for ours, one in zip(read_rows(out), scored, strict=True)
        for a, b in zip(ours["entropy"], one["entropy"], strict=True)
    ]
    assert 0 < max(differences) < 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"vocab_size": 10**15},
            "describes a model of 6.4e+16 weights or more, but the checkpoint has 9.09e+04; does its",
        ),
        ({"intermediate_size": 1 << 61}, "does its config.json belong to its weights?"),
        ({"head_dim": 1 << 40}, "does its config.json belong to its weights?"),
        (
            {"vocab_size": 1 << 70},
            "vocab_size is 1180591620717411303424; supported: a whole number of 2 or more, below 2^62",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported: at most 65536"),
    ],
)
def test_a_config_of_a_far_larger_model_is_refused_before_memory_is_asked_for(
    changes: dict[str, int], words: str, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **changes}))
    data, out = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6]}]), tmp_path / "out"
    for command in ("score", "generate"):
        assert words in refusal(
            here(command, "--model", tmp_path / "model", "--data", data, "--out", out)
        )
    assert words in refusal(here("convert", tmp_path / "model", out, "--to", "sharded"))
    assert not out.exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "link.jsonl").symlink_to(data / "x.jsonl")
    for out, why in (
        (tmp_path, "is a directory; give the path of a file"),
        (data / "x.jsonl", "is no directory that you may write to"),
        (tmp_path / "link.jsonl", "is no directory that you may write to"),
    ):
        told = refusal(here("score", "--model", tmp_path / "absent", "--data", data, "--out", out))
        assert why in told


def test_an_output_that_is_no_file_stays_what_it_is(model: Path, tmp_path: Path) -> None:
    """A rename would make a file of /dev/null itself, and of a link, where its owner may."""
    data, pipe, link = (
        write_rows(tmp_path / "rows.jsonl", ROWS[:1]),
        tmp_path / "pipe",
        tmp_path / "link.jsonl",
    )
    os.mkfifo(pipe)
    told = refusal(here("score", "--model", model, "--data", data, "--out", pipe))
    assert (
        told
        == f"--out {pipe} is a device or a pipe, which a file would replace; give the path of a file\n"
    )
    assert pipe.is_fifo()
    (tmp_path / "far").mkdir()
    link.symlink_to("far/out.jsonl")
    assert here("score", "--model", model, "--data", data, "--out", link).code == 0
    assert link.is_symlink()
    assert len(read_rows(tmp_path / "far/out.jsonl")) == 1


@pytest.mark.parametrize("command", ["score", "generate"])
def test_rows_are_not_replaced_by_what_comes_of_them(
    command: str, model: Path, tmp_path: Path
) -> None:
    data, link = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "link.jsonl"
    link.symlink_to(data)
    before = data.read_bytes()
    for out in (data, link):
        told = refusal(here(command, "--model", model, "--data", data, "--out", out))
        assert (
            told
            == f"--out {out} is the file that --data names, and would replace it; give another path\n"
        )
    assert data.read_bytes() == before


def test_an_output_is_replaced_whole(model: Path, tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    out.write_text("old\n")
    assert (
        here(
            "score", "--model", model, "--data", write_rows(tmp_path / "bad", ["{"]), "--out", out
        ).code
        == 2
    )
    assert out.read_text() == "old\n"
    assert here("score", "--model", model, "--data", data, "--out", out).code == 0
    (row,) = read_rows(out)
    assert all(math.isfinite(number) for number in row["log_probs"])
    assert (
        json.dumps(sorted(path.name for path in tmp_path.iterdir()))
        == '["bad", "out.jsonl", "rows.jsonl"]'
    )
