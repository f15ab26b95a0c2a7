"""`dovetail train` on GPUs: a killed and resumed run has the bits of one that never stopped, and only its first step compiles."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen2Config

from examples.quickstart.scratch import character_tokenizer
from tests.helpers.parity_configs import tiny_model
from tests.helpers.processes import waited

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS, KILLED_AT, SECONDS = 6, 3, 240
LENGTHS = (200, 3000)  # of rows, in tokens: up to 24 tiles of attention
CONFIG = Qwen2Config(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, demonstrations, prompts and a reward."""
    folder, draw = tmp_path_factory.mktemp("inputs"), random.Random(0)
    tokenizer = character_tokenizer()
    tiny_model(CONFIG).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def text(shortest: int, longest: int) -> str:
        return "".join(draw.choices("0123456789", k=draw.randint(shortest, longest)))

    sft = [{"prompt": text(*LENGTHS), "completion": text(20, 60)} for _ in range(64)]
    rl = [{"prompt": text(4, 600), "answer": text(1, 1)} for _ in range(64)]
    for name, rows in (("sft", sft), ("grpo", rl)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def threes(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str.count('3'))\n"
    )
    return folder


def command(inputs: Path, name: str, run_dir: Path, layout: str, **trainer: Any) -> list[str]:
    """`dovetail train` by a recipe."""
    recipe: dict[str, Any] = {
        "model": {"path": str(inputs / "model"), "dtype": "bfloat16"},
        "algorithm": {"name": name},
        "data": {"train": str(inputs / f"{name}.jsonl")},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 24},
        "reward": {"import": "reward:threes"},
        "optim": {"lr": 1e-4},
        "trainer": {
            "steps": STEPS,
            "prompts_per_step": 8,
            "tokens_per_batch": 4096,
            "save_every": 0,
            **trainer,
        },
        "run_dir": str(run_dir),
    }
    if name == "sft":
        del recipe["rollout"], recipe["reward"]
    path = inputs / f"{run_dir.name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return [sys.executable, "-m", "dovetail", "train", str(path), "--layout", layout]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics so far."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(run_dir: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows(run_dir)]


def weights(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run_dir / "hf").glob("*.safetensors"))}


def finished(given: list[str], env: Mapping[str, str] = os.environ) -> None:
    ended = subprocess.run(
        given, capture_output=True, text=True, timeout=SECONDS, check=False, env=dict(env)
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["sft", "grpo"])
@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "tp=2"])
def test_a_killed_and_resumed_run_has_the_same_bits(
    inputs: Path, tmp_path: Path, layout: str, name: str
) -> None:
    if layout != "dp=1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finished(command(inputs, name, straight, layout))
    given = command(inputs, name, killed, layout, save_every=1, async_save=False, steps=STEPS)
    process = subprocess.Popen(
        given, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    there = waited(lambda: len(rows(killed)) > KILLED_AT or process.poll() is not None, SECONDS)
    os.killpg(process.pid, signal.SIGKILL)
    assert there and process.wait() == -signal.SIGKILL and len(rows(killed)) < STEPS
    finished(given)
    assert curve(killed) == curve(straight)
    assert weights(killed) == weights(straight)


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_only_the_first_step_compiles(inputs: Path, tmp_path: Path, name: str) -> None:
    """Packages write what they compile to the disk: nothing there is younger than the first step's metrics."""
    caches = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    given = command(inputs, name, tmp_path / "run", "dp=1", steps=10, tokens_per_batch=6000)
    process = subprocess.Popen(
        given, env={**os.environ, **caches}, stderr=subprocess.PIPE, text=True
    )
    assert waited(lambda: bool(rows(tmp_path / "run")) or process.poll() is not None, SECONDS)
    first = time.time()
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert not [line for line in said.splitlines() if "Warning" in line]
    made = [
        path
        for name in ("cache", "triton")
        for path in (tmp_path / name).rglob("*")
        if path.is_file()
    ]
    late = [f"{path.relative_to(tmp_path)} {path.stat().st_mtime - first:.1f} s" for path in made]
    late = [
        text
        for text, path in zip(late, made, strict=True)
        if path.stat().st_mtime > first and path.suffix != ".lock"
    ]
    assert made and not late, late
