"""CONTRIBUTING's reading order is measured: the files that a `train_step` of a dense model on one rank enters."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dovetail as dt
from bench.models import one_rank
from dovetail.batch.loss import Loss, TokenStats
from tests.helpers.parity_configs import save_tiny, tiny_configs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/dovetail"
MAX_FILES, MAX_LINES = 19, 4400


def token_mean(stats: TokenStats, batch: dt.PackedBatch) -> Loss:
    return Loss(-stats.logprob.sum(), batch.mask.sum(), {})


def entered(folder: Path) -> list[str]:
    """Files of the package in which a function is called during the second training step."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    options = dt.EngineOptions(optim=dt.OptimSettings(lr=1e-3))
    with one_rank():
        engine = dt.from_pretrained(folder, device="cpu", dtype=torch.float32, options=options)
        batch = dt.PackedBatch.pack([[1, 5, 7, 2, 9, 4], [3, 8, 2, 6]])
        engine.train_step(batch, token_mean)
        sys.setprofile(note)
        try:
            engine.train_step(batch, token_mean)
        finally:
            sys.setprofile(None)
    return sorted(
        str(Path(file).relative_to(PACKAGE)) for file in files if file.startswith(str(PACKAGE))
    )


def test_a_training_step_enters_few_files_and_contributing_lists_them(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["qwen3"], tmp_path)
    files = entered(tmp_path)
    lines = sum((PACKAGE / file).read_text().count("\n") for file in files)
    listed = set(re.findall(r"`(\w+/\w+\.py|\w+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert set(files) <= listed, sorted(set(files) - listed)
    assert len(files) <= MAX_FILES
    assert lines <= MAX_LINES
