"""The last check of a run: does plain transformers load the result, and does it answer better than the model before?"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def accuracy(model_dir: Path, rows: Sequence[dict[str, Any]], max_new_tokens: int) -> float:
    """Share of rows whose greedy continuation is exactly the answer, an optional full stop, and the end."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True
    ).eval()
    given = (
        model.generation_config.eos_token_id
    )  # the ids that end a text, which not every tokenizer knows
    ends = given if isinstance(given, list) else [given]
    tokenizer.pad_token_id = ends[0]
    prompts = [row["prompt"] for row in rows]
    batch = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=ends[0],
    )[:, batch.input_ids.shape[1] :]
    right = 0
    for row, new in zip(rows, ids.tolist(), strict=True):
        end = next((i for i, token in enumerate(new) if token in ends), None)
        right += (
            end is not None
            and tokenizer.decode(new[:end]).strip().removesuffix(".") == row["answer"]
        )
    return right / len(rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
