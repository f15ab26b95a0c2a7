"""Devices and memory as the parent sees them, a finished run that is started again, and what is no mistake."""

import ctypes
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dovetail import system
from dovetail.checkpoint.manifest_body import FORMAT, VERSION, checksum
from dovetail.cli import header
from dovetail.cli.main import run_command
from dovetail.cli.preflight import read_model
from dovetail.recipe.schema import load_recipe

GPU = 80 * 10**9
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
SCORE = ["score", "--model", "M", "--data", "D.jsonl", "--out", "O"]


def write_header(folder: Path, dtype: str) -> None:
    """Of 100 GB of weights, which are not there."""
    kind, size = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}[dtype]
    tensor = {"dtype": kind, "shape": [10**11 // size], "data_offsets": [0, 10**11]}
    text = json.dumps(
        {"__metadata__": {"format": "pt"}, "model.embed_tokens.weight": tensor}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What would have started, on a machine of 8 GPUs of 80 GB and 1 TB of memory, with a model of 100 GB."""
    calls: list[object] = []
    (tmp_path / "M").mkdir()
    (tmp_path / "M/config.json").write_text(json.dumps(CONFIG))
    write_header(tmp_path / "M", "float32")
    (tmp_path / "M/tokenizer.json").write_text("{}")
    (tmp_path / "D.jsonl").write_text('{"prompt": "a", "completion": "b", "answer": "b"}\n')
    recipe: dict[str, Any] = {
        "model": {"path": "M"},
        "data": {"train": "D.jsonl"},
        "run_dir": "run",
    }
    recipe |= {"algorithm": {"name": "sft"}}
    (tmp_path / "R.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("dovetail.system.gpu_memory", lambda: [GPU] * 8)
    monkeypatch.setattr("dovetail.system.free_memory", lambda: 10**12)

    def start(*given: object) -> int:
        calls.append(given)
        return 0

    for name in ("run_ranks", "_run_as_rank"):
        monkeypatch.setattr(f"dovetail.cli.main.{name}", start)
    return calls


@pytest.mark.parametrize(
    ("argv", "dtype", "words"),
    [
        ([*SCORE, "--layout", "dp=2"], "float32", None),
        (
            [*SCORE],
            "float32",
            "the weights need at least 100.0 GB on each of 1 GPUs, which have 80.0 GB; use more GPUs",
        ),
        ([*SCORE], "bfloat16", "at least 200.0 GB on each of 1 GPUs"),  # computed in float32
        ([*SCORE, "--dtype", "bfloat16"], "float32", None),
        ([*SCORE, "--device", "cpu"], "float32", None),
        (
            [*SCORE, "--layout", "dp=16", "--device", "cuda"],
            "float32",
            "16 ranks on this machine need a cuda device each",
        ),
        (["train", "R.yaml", "--layout", "tp=8"], "float32", None),
        (["train", "R.yaml", "--layout", "tp=4"], "float32", "at least 100.0 GB on each of 4 GPUs"),
        (
            ["train", "R.yaml", "--layout", "tp=8"],
            "bfloat16",
            "at least 100.0 GB on each of 8 GPUs",
        ),
        (
            ["train", "R.yaml", "--layout", "tp=8", "trainer.offload_optimizer=true"],
            "bfloat16",
            None,
        ),
        (["train", "R.yaml", "--layout", "tp=8", "--device", "cpu"], "float32", None),
        (
            ["train", "R.yaml", "--device", "cpu"],
            "bfloat16",
            "1 rank needs at least 800.3 GB of memory, but 500.0 GB",
        ),
    ],
)
def test_memory_is_compared_with_the_least_that_a_model_needs(
    argv: list[str],
    dtype: str,
    words: str | None,
    started: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_header(Path("M"), dtype)
    if "500.0" in (words or ""):
        monkeypatch.setattr("dovetail.system.free_memory", lambda: 500 * 10**9)
    assert run_command(argv) == (2 if words else 0)
    assert (words or "") in capsys.readouterr().err
    assert bool(started) == (words is None)


@pytest.mark.usefixtures("started")
def test_no_devices_are_none_and_unknown_ones_are_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert run_command([*SCORE, "--device", "cuda"]) == 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("dovetail.system.gpu_memory", list)
    monkeypatch.setattr("sys.platform", "darwin")
    assert run_command([*SCORE, "--device", "cuda"]) == 0


def test_the_header_counts_devices_and_parameters_as_the_checks_do(
    started: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus/0").mkdir(parents=True)
    (tmp_path / "gpus/0/information").write_text("Model: \t NVIDIA H100\nIRQ: 1\n")
    monkeypatch.setattr(header, "GPUS", tmp_path / "gpus")
    assert header.devices("auto") == header.devices("cuda") == "8 x NVIDIA H100"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert header.devices("auto") == header.devices("cpu") == f"cpu, {system.cores()} cores"
    assert header.count_parameters(Path("M")) == read_model("M").parameters == 25 * 10**9  # type: ignore[union-attr]  # it is there
    shutil.copy(
        "M/model.safetensors", "M/consolidated.safetensors"
    )  # another copy, which is not loaded
    assert header.count_parameters(Path("M")) == 25 * 10**9
    shutil.copy("M/model.safetensors", "M/model-00001-of-00002.safetensors")
    Path("M/model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    "a": "model-00001-of-00002.safetensors",
                    "b": "model-00001-of-00002.safetensors",
                }
            }
        )
    )
    assert header.count_parameters(Path("M")) == 25 * 10**9
    assert not started


def test_sizes_of_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(out: Any) -> int:
        out._obj.value = 2
        return 0

    def handle(index: int, out: Any) -> int:
        out._obj.value = index + 1
        return 0

    def memory(device: ctypes.c_void_p, out: Any) -> int:
        out[0] = GPU * (device.value or 0)
        return 0

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setattr("ctypes.CDLL", lambda _: nvml)
    assert system.gpu_memory() == [GPU, 2 * GPU]
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    assert system.gpu_memory() == []


def test_a_finished_run_starts_no_rank(
    started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/hf").mkdir(parents=True)
    Path("run/config.yaml").write_text(load_recipe("R.yaml", ["layout.tp=8"]).to_yaml())
    Path("D.jsonl").unlink()
    assert run_command(["train", "R.yaml", "layout.tp=8"]) == 0
    told = capsys.readouterr().err
    assert told.startswith(
        "dovetail: run_dir run holds this run, which is finished: nothing to do (run/hf); choose another"
    )
    assert run_command(["train", "R.yaml", "layout.tp=8", "optim.lr=0.5"]) == 2
    told = capsys.readouterr().err
    assert "D.jsonl: no such data file" in told
    assert "it holds a run of another recipe that saved no checkpoint (optim.lr was" in told
    assert not started


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "optim.lr=0.5",
            "run_dir run holds a finished run of another recipe (optim.lr was 1e-06, is 0.5); all 4 steps",
        ),
        ("trainer.seed=3", "the run cannot go on with these changes"),
        ("trainer.steps=3", "trainer.steps is 3, but the run has done 4 steps already"),
        ("trainer.steps=5", None),
    ],
)
@pytest.mark.parametrize("damage", [False, True])
def test_a_finished_run_of_another_recipe_is_refused(
    change: str,
    words: str | None,
    damage: bool,
    started: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is said of a run whose newest checkpoint cannot be read: another one may be."""
    given = ["layout.tp=8", "trainer.steps=4"]
    recipe = load_recipe("R.yaml", given)
    folder = Path("run/checkpoints/step_000004.abc")
    folder.mkdir(parents=True)
    Path("run/hf").mkdir()
    Path("run/config.yaml").write_text(recipe.to_yaml())
    state = {"order": 1, "step": 4, "recipe": recipe.model_dump(mode="json", by_alias=True)}
    body = {"format": FORMAT, "version": VERSION, "state": state}
    crc = checksum(body) + damage
    (folder / "MANIFEST.json").write_text(json.dumps({**body, "crc32": crc}))
    refused = words is not None and not damage
    assert run_command(["train", "R.yaml", *given, change]) == (2 if refused else 0)
    told = capsys.readouterr()
    assert bool(started) is not refused
    if refused:
        assert (words or "") in told.err
        assert told.out == ""


def test_modules_of_losses_are_found_without_being_run(started: list[object]) -> None:
    Path("mine.py").write_text("raise RuntimeError\ndef f(): ...")
    argv = ["train", "R.yaml", "algorithm.name=grpo", "layout.tp=8"]
    for module, name in (("mine", "f"), ("json.decoder", "any_name")):
        assert run_command([*argv, f"algorithm.advantage.import={module}:{name}"]) == 0
    assert len(started) == 2


@pytest.mark.usefixtures("started")
def test_preflight_loads_no_torch() -> None:
    code = (
        "import sys; from dovetail.cli.main import run_command\n"
        "assert run_command(['train', 'R.yaml', 'layout.tp=3', 'model.path=none']) == 2\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
