"""`dovetail convert` and `inspect`: HF to sharded and back byte for byte, and what a checkpoint says of itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForTokenClassification

from tests.helpers.checkpoints import assert_same_tensors, digests, tensors_of
from tests.helpers.parity_configs import tiny_configs, tiny_model
from tests.helpers.program import (
    Ended,
    here,
    make_model,
    on_ranks,
    program,
    read_rows,
    refusal,
    write_rows,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("convert") / "bf16", dtype=torch.bfloat16, tie_word_embeddings=True
    )


def test_through_two_ranks_and_back(source: Path, tmp_path: Path) -> None:
    cut, back = tmp_path / "c\u00fct", tmp_path / "back"
    assert {
        each.well
        for each in on_ranks(2, "convert", source, cut, "--to", "sharded", "--layout", "tp=2")
    } == {True}
    assert len(list(cut.glob("pieces-*"))) == 2
    ended = program("inspect", cut, "--verify", env={"PYTHONIOENCODING": "ascii"})  # of a terminal
    assert (ended.code, ended.err) == (0, "")
    assert "tp=2,pp=1,cp=1,dp=1,ep=1" in ended.out
    assert "bfloat16" in ended.out
    assert ended.out.endswith("verified: every piece matches its checksum\n")
    assert here("convert", cut, back, "--to", "hf").well
    assert digests(back) == digests(source), "every file, byte for byte"
    assert {path.name for path in tmp_path.iterdir()} == {cut.name, "back"}


@pytest.mark.parametrize("bias", [True, False])
def test_a_value_model_keeps_its_head(bias: bool, tmp_path: Path) -> None:
    source = tmp_path / "values"
    peer = tiny_model(tiny_configs()["llama"], values=True)
    if not bias:
        peer.score = torch.nn.Linear(64, 1, bias=False)
    peer.save_pretrained(source)
    ended = on_ranks(2, "convert", source, tmp_path / "cut", "--to", "sharded", "--layout", "tp=2")
    assert {each.well for each in ended} == {True}
    assert {
        each.well
        for each in on_ranks(2, "convert", tmp_path / "cut", tmp_path / "back", "--to", "hf")
    } == {True}
    assert digests(tmp_path / "back") == digests(source)
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}])
    found = []
    for model in (source, tmp_path / "cut", tmp_path / "back"):
        assert (
            here(
                "score",
                "--model",
                model,
                "--data",
                rows,
                "--out",
                tmp_path / "o",
                "--head",
                "value",
            ).code
            == 0
        )
        found.append(read_rows(tmp_path / "o"))
    assert found[0] == found[1] == found[2]
    if bias:
        AutoModelForTokenClassification.from_pretrained(tmp_path / "back")


def test_a_value_head_without_bias_beside_an_lm_head(tmp_path: Path) -> None:
    source = tmp_path / "values"
    peer = tiny_model(tiny_configs()["llama"], values=True)
    peer.save_pretrained(source)
    tensors = {name: x for name, x in peer.state_dict().items() if not name.startswith("score.")}
    tensors |= {
        "v_head.weight": peer.score.weight.detach(),
        "lm_head.weight": peer.get_input_embeddings().weight + 1,
    }
    save_file(
        {name: x.contiguous() for name, x in tensors.items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    ended = here("convert", source, tmp_path / "cut", "--to", "sharded")
    assert ended.well, ended.err
    assert here("convert", tmp_path / "cut", tmp_path / "back", "--to", "hf").well
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))


def test_a_cast_there_and_back(source: Path, tmp_path: Path) -> None:
    wide, again = tmp_path / "wide", tmp_path / "again"
    assert (
        here("convert", source, tmp_path / "cut", "--to", "sharded", "--dtype", "float32").code == 0
    )
    assert here("convert", tmp_path / "cut", wide, "--to", "hf").code == 0
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    assert here("convert", wide, again, "--to", "hf", "--dtype", "bfloat16").code == 0
    assert_same_tensors(tensors_of(again), tensors_of(source))


def test_a_sharded_checkpoint_is_a_model_for_every_command(source: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    assert here("convert", source, cut, "--to", "sharded").code == 0
    assert here("convert", cut, tmp_path / "recut", "--to", "sharded").code == 0
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    told = []
    for model in (source, cut, tmp_path / "recut"):
        assert here("score", "--model", model, "--data", rows, "--out", tmp_path / "o").code == 0
        told.append(read_rows(tmp_path / "o"))
        assert here("generate", "--model", model, "--data", rows, "--out", tmp_path / "o").code == 0
        told.append(read_rows(tmp_path / "o"))
    assert told[0::2] == [told[0]] * 3
    assert told[1::2] == [told[1]] * 3


def test_a_place_that_is_taken_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    for to in ("sharded", "hf"):
        told = refusal(here("convert", source, tmp_path / "taken", "--to", to))
        assert (
            "taken is there already and is not an empty directory; remove it or choose another path"
            in told
        )
        told = refusal(here("convert", source, tmp_path / "taken" / "file" / "x", "--to", to))
        assert "file is no directory that you may write to" in told
    assert "invalid choice: 'gguf'" in refusal(
        here("convert", source, tmp_path / "x", "--to", "gguf")
    )
    assert "the following arguments are required: --to" in refusal(
        here("convert", source, tmp_path / "x")
    )


def test_a_place_that_no_directory_can_replace(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume, or where the user stands: renames of directories end there with an error of the system's."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for place in (".", tmp_path / "empty"):
        told = refusal(here("convert", source, place, "--to", "sharded"))
        assert (
            "is a mount point or the working directory, which cannot be replaced; give a path inside it"
            in told
        )
    assert {path.name for path in tmp_path.rglob("*")} == {"empty"}
    assert here("convert", source, "inside", "--to", "sharded").code == 0


@pytest.fixture
def cut(source: Path, tmp_path: Path) -> Path:
    assert here("convert", source, tmp_path / "cut", "--to", "sharded").code == 0
    return tmp_path / "cut"


@pytest.mark.parametrize("to", ["sharded", "hf"])
def test_a_place_that_is_taken_is_told_before_the_source_is_read(
    to: str, cut: Path, tmp_path: Path
) -> None:
    (piece,) = cut.glob("pieces-*")
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "cut is there already" in refusal(here("convert", cut, cut, "--to", to))
    assert "is damaged" in refusal(here("convert", cut, tmp_path / "new", "--to", to))


def test_inspect_finds_a_flipped_bit_only_when_it_verifies(cut: Path) -> None:
    (piece,) = cut.glob("pieces-*")
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert here("inspect", cut).code == 0
    told = refusal(here("inspect", cut, "--verify"))
    assert "is damaged; use an older checkpoint or another copy" in told
    assert "does not match its checksum" in told


@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_inspect_of_what_is_no_whole_checkpoint(verify: list[str], cut: Path) -> None:
    (piece,) = cut.glob("pieces-*")
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1])
    assert "but the manifest says" in refusal(here("inspect", cut, *verify))
    piece.unlink()
    assert "does not exist" in refusal(here("inspect", cut, *verify))
    (cut / "MANIFEST.json").write_text("{}")
    assert "format None, expected 'dovetail-sharded'" in refusal(here("inspect", cut, *verify))


def test_doctor() -> None:
    ended: Ended = here("doctor", "--device", "cpu")
    assert (ended.code, ended.err) == (0, "")
    for word in ("torch", "transformers", "devices", "kernels", "self-test", "all well"):
        assert word in ended.out
