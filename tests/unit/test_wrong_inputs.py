"""Wrong inputs: exit code 2 and one message that names the culprit, soon, and before torch or any rank."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.cli.main import run_command
from tests.helpers.wrong_inputs import CASES, parts_of

SECONDS = 2.0  # of the processor, which a loaded machine does not lengthen
SIZES = {
    "vocab_size": 8,
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Any] = {
    "M": {"model_type": "llama", **SIZES},
    "moe": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **SIZES},
    "gpt": {"model_type": "gpt_neox", **SIZES},
    "listed": [],
    "untyped": SIZES,
    "headless": {
        name: size
        for name, size in {"model_type": "llama", **SIZES}.items()
        if name != "num_attention_heads"
    },
    "wordy": {"model_type": "llama", **SIZES, "hidden_size": "large"},
}
TEXTS = {
    "torn/config.json": "{",
    "twice/config.json": '{"model_type": "llama", "model_type": "qwen2"}',
    "bin/config.json": json.dumps(CONFIGS["M"]),
    "bin/pytorch_model.bin": "x",
    "bare/config.json": json.dumps(CONFIGS["M"]),
    "adapter/adapter_config.json": "{}",
    "adapter/config.json": json.dumps(CONFIGS["M"]),
    "empty/.keep": "",
    "used/other.txt": "x",
    "done/config.yaml": "run_dir: done\n",
    "done/metrics.jsonl": "",
    "D.jsonl": '{"prompt": "a", "answer": "b"}\n',
    "tab.yaml": "optim:\n\tlr: 1\n",
    "list.yaml": "- 1\n",
    "twice.yaml": "optim: {}\noptim: {}\n",
    "blank.yaml": "",
    "R.yaml": yaml.safe_dump(
        {"model": {"path": "M"}, "data": {"train": "D.jsonl"}, "run_dir": "run"}
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    configs = {f"{name}/config.json": json.dumps(config) for name, config in CONFIGS.items()}
    weights = {f"{name}/model.safetensors": "" for name in (*CONFIGS, "torn", "twice")}
    for name, text in {**TEXTS, **configs, **weights}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_there_are_enough() -> None:
    assert len(set(CASES)) == len(CASES) >= 150


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_input_is_refused_at_once(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, words = parts_of(case)
    started: list[object] = []
    for name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("dovetail.cli.main.run_ranks", lambda *given: started.append(given))
    monkeypatch.setattr("dovetail.cli.main._run_as_rank", lambda *given: started.append(given))
    monkeypatch.setattr("dovetail.cli.preflight.visible_gpus", lambda: 0)
    monkeypatch.setattr("dovetail.system.free_memory", lambda: 1 << 33)
    before, begun = sorted(folder.rglob("*")), time.process_time()
    code = run_command(argv)
    seconds = time.process_time() - begun
    told = capsys.readouterr()
    assert (code, told.out, started) == (2, "", []), told
    assert told.err.startswith("dovetail: "), told.err
    assert told.err.count("dovetail: ") == 1, told.err
    assert "Traceback" not in told.err
    assert [word for word in words if word not in told.err] == [], told.err
    assert sorted(folder.rglob("*")) == before, "nothing is written"
    assert seconds < SECONDS
