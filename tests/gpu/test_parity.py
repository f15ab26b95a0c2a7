"""The parity script of bench/ on a CUDA device: float32 within 1e-5 of transformers, bfloat16 within 1.2 of its error."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_one_gpu(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "bench.parity", "--device", "cuda", "--out", str(tmp_path)]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("layout", ["tp=2", "dp=2"])
def test_two_gpus(tmp_path: Path, layout: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = [*launch, "-m", "bench.parity", "--device", "cuda", "--layout", layout, "--out", str(tmp_path)]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0
