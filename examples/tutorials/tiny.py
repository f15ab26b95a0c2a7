"""What the tutorials use instead of a download: models of some thousand parameters, and a shell that a notebook shows."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessorPil,
)

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout, for examples.quickstart
from examples.quickstart.scratch import character_tokenizer

CHAT = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def sh(command: str, exit_code: int = 0) -> None:
    """Run `dovetail ...` and print its lines as they come. An unexpected exit code ends the tutorial."""
    print("$", command, flush=True)
    words = [sys.executable, "-m", *shlex.split(command)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
    if process.returncode != exit_code:
        raise SystemExit(f"exit code {process.returncode}, expected {exit_code}: {command}")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def language_model(folder: Path) -> PreTrainedTokenizerFast:
    """Write a Qwen2 of 76,000 random parameters whose tokens are digits and signs."""
    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def vision_model(folder: Path) -> None:
    """Write a Qwen2.5-VL of 128,000 random parameters, with a chat template and an image processor: 4 x 4 pixels are a patch."""
    tokenizer = character_tokenizer()
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.chat_template = CHAT
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
    }
    tower |= {"intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(marks)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=False, **ids
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(
        **sizes, size={"shortest_edge": 64, "longest_edge": 512}
    ).save_pretrained(folder)
