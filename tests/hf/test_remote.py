"""Kimi-VL's structure as code in a model's directory: it runs where the user trusts it, and nowhere else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.utils.hub import HF_MODULES_CACHE

from dovetail.batch import PackedBatch, Sequence
from dovetail.build.engine import EngineOptions, from_pretrained
from dovetail.hf.remote import LOCK
from dovetail.layout import Layout
from tests.checkpoints import digests
from tests.commands.program import here, on_ranks, read_rows, refusal, write_recipe, write_rows
from tests.harness import run
from tests.hf.eyes import IMAGE_ID, SEEN, VOCAB, encoded, picture, said, seeing_tokenizer, user
from tests.hf.families import MLA
from tests.hf.kimi_vl.configuration_kimi_vl import KimiVLConfig
from tests.hf.kimi_vl.image_processing_kimi_vl import KimiVLImageProcessor
from tests.hf.kimi_vl.modeling_kimi_vl import KimiVLForConditionalGeneration
from tests.parity.configs import tiny
from tests.parity.reference import GRAD, objective, outputs_of
from tests.probe import PROBE, gradients
from tests.tolerances import MODEL_FP32, worst_error

FOLDER = Path(__file__).parent / "kimi_vl"
FILES = ("configuration_kimi_vl", "modeling_kimi_vl", "image_processing_kimi_vl")
AUTO = {"AutoConfig": f"{FILES[0]}.KimiVLConfig", "AutoModelForCausalLM": f"{FILES[1]}.KimiVLForConditionalGeneration"}
TALL, SMALL = picture(19, 14, 1), picture(8, 8, 3)
TRUST = "--trust-remote-code"
NOTE = """
import fcntl
with open({ran!r}, "a") as note, open({lock!r}, "a") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note.write("free ")
    except BlockingIOError:
        note.write("held ")
"""


def stand_in() -> KimiVLForConditionalGeneration:
    """A random float32 model, no parameter at its initial zeros or ones."""
    text = tiny(DeepseekV3Config, **{**MLA, "vocab_size": VOCAB, "eos_token_id": 3, "tie_word_embeddings": False})
    config = KimiVLConfig(text_config=text.to_dict(), media_placeholder_token_id=IMAGE_ID)
    config.text_config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = KimiVLForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the hub has it: weights, settings and code."""
    path = tmp_path_factory.mktemp("kimi_vl")
    stand_in().save_pretrained(path)
    seeing_tokenizer().save_pretrained(path)
    for name in FILES:
        shutil.copy(FOLDER / f"{name}.py", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "auto_map": AUTO}))
    settings = {"patch_size": 4, "auto_map": {"AutoImageProcessor": f"{FILES[2]}.KimiVLImageProcessor"}}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def rows_of(data: Path) -> list[dict[str, Any]]:
    (data.parent / "tall.png").write_bytes(encoded(TALL))
    (data.parent / "small.png").write_bytes(encoded(SMALL))
    see, two = {"type": "image", "image": "tall.png"}, [{"type": "image", "image": "small.png"}] * 2
    return [
        {"prompt": user(see, "What?"), "completion": "a cat"},
        {"prompt": "two", "completion": " words"},
        {"prompt": user("A ", *two), "completion": "!"},
    ]


def test_scores_are_those_of_its_own_code(folder: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(data, rows_of(data))
    flags = ["--layout", "cp=2", TRUST]
    assert on_ranks(2, "score", "--model", folder, "--data", data, "--out", out, *flags) == [(0, "", "")] * 2
    model, processor, tokenizer = stand_in(), KimiVLImageProcessor(), seeing_tokenizer()
    texts = [(said(SEEN, "What?") + "a cat", [TALL]), ("two words", []), (said("A ", SEEN, SEEN) + "!", [SMALL, SMALL])]
    for row, (text, images) in zip(read_rows(out), texts, strict=True):
        seen = processor.preprocess(images, return_tensors="pt") if images else {}
        for height, width in seen["image_grid_hws"].tolist() if images else []:
            text = text.replace("<|image_pad|>", "\0" * (height * width // 4), 1)
        ids = torch.tensor([tokenizer.encode(text.replace("\0", "<|image_pad|>"), add_special_tokens=False)])
        with torch.no_grad():
            logp = model(ids, **seen).logits[0, :-1].log_softmax(-1)
        wanted = logp.gather(1, ids[0, 1:, None])[:, 0].tolist() + (-(logp.exp() * logp).sum(-1)).tolist()
        for a, b in zip(row["log_probs"] + row["entropy"], wanted, strict=True):
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


def trained(path: Path, batch: PackedBatch) -> dict[str, Tensor]:
    options = EngineOptions(optim=PROBE, trust_remote_code=True)
    engine = from_pretrained(path, layout=Layout(), device="cpu", options=options)
    engine.train_step(batch, objective)
    return gradients(engine)[0]


def test_gradients_are_those_of_its_own_code(folder: Path) -> None:
    """Two images in one sequence, none in another; as a library."""
    draw = torch.Generator().manual_seed(5)
    grids = torch.tensor([[1, 2, 6], [1, 4, 2]])
    media = {"pixel_values": torch.randn(20, 3, 4, 4, generator=draw), "image_grid_thw": grids}
    ids = [5, *[IMAGE_ID] * 3, 6, 7, *[IMAGE_ID] * 2, 8]
    batch = PackedBatch.pack([Sequence(ids, media=media), Sequence([9, 10, 11])])
    w0, w1 = torch.randn(2, len(batch), generator=draw)
    batch = batch.with_fields(w0=w0, w1=w1, temperature=torch.ones(len(batch)))
    model = stand_in()
    seen = {"pixel_values": media["pixel_values"], "image_grid_hws": grids[:, 1:]}
    first, second = batch.tokens.split(list(batch.lengths))
    logits = torch.cat([model(first[None], **seen).logits[0], model(second[None]).logits[0]])
    wanted = {
        name.removeprefix(GRAD): grad
        for name, grad in outputs_of(model, logits, batch).items()
        if name.startswith(GRAD)
    }
    (found,) = run(1, trained, folder, batch)
    assert worst_error(found, wanted)[0] <= MODEL_FP32


def test_its_code_does_not_run_unless_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    """Not for rows of ids either, which need neither tokenizer nor processor. Ranks import it one after the other."""
    watched, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(folder, watched)
    for name in FILES:
        file = watched / f"{name}.py"
        file.write_text(NOTE.format(ran=str(ran), lock=str(Path(HF_MODULES_CACHE) / LOCK)) + file.read_text())
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    command = ["score", "--model", watched, "--data", data, "--out", tmp_path / "out.jsonl"]
    assert "'kimi_vl' is code that comes with the model; --trust-remote-code" in refusal(here(*command))
    assert not ran.exists()
    assert here(*command, TRUST).code == 0
    assert set(ran.read_text().split()) == {"held"}, "it ran, and alone"


@pytest.mark.parametrize("broken", [None, "def", "raise ZeroDivisionError"])
def test_code_that_is_missing_or_does_not_run_is_refused(folder: Path, tmp_path: Path, broken: str | None) -> None:
    for name in FILES[:2]:
        model = tmp_path / name
        shutil.copytree(folder, model)
        file = model / f"{name}.py"
        file.unlink() if broken is None else file.write_text(broken)
        data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
        told = refusal(here("score", "--model", model, "--data", data, "--out", tmp_path / "out.jsonl", TRUST))
        assert "makes no model of" in told


def test_it_trains_and_comes_back(folder: Path, tmp_path: Path) -> None:
    """Tower and projector too; hf/ has the code and loads as the directory did."""
    data = tmp_path / "sft.jsonl"
    write_rows(data, rows_of(data))
    recipe = write_recipe(tmp_path / "r.yaml", folder, data, model={"trust_remote_code": True})
    assert here("train", recipe).code == 0
    metrics, saved = read_rows(tmp_path / "run/metrics.jsonl"), tmp_path / "run/hf"
    assert metrics[1]["loss"] < metrics[0]["loss"]
    assert all((saved / f"{name}.py").read_bytes() == (folder / f"{name}.py").read_bytes() for name in FILES)
    after, before = KimiVLForConditionalGeneration.from_pretrained(saved).state_dict(), stand_in().state_dict()
    assert after.keys() == before.keys()
    for name in ("vision_tower.encoder.blocks.0.wqkv.weight", "multi_modal_projector.linear_1.weight"):
        assert not torch.equal(after[name], before[name])


def test_it_is_cut_and_comes_back(folder: Path, tmp_path: Path) -> None:
    """Its code says how it is cut; rejoining needs none of it."""
    command = ["convert", folder, tmp_path / "cut", "--to", "sharded"]
    assert "'kimi_vl' is code that comes with the model; --trust-remote-code" in refusal(here(*command))
    assert here(*command, TRUST) == (0, "", "")
    assert here("convert", tmp_path / "cut", tmp_path / "back", "--to", "hf") == (0, "", "")
    assert digests(tmp_path / "back") == digests(folder)


def test_its_own_generate_is_not_run(folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    told = refusal(here("generate", "--model", folder, "--data", data, "--out", tmp_path / "out.jsonl", TRUST))
    assert "its own generate is not run" in told
