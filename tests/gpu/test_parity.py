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


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *((2, layout) for layout in ("tp=2", "dp=2", "pp=2", "cp=2", "cp=2,cp_mode=gather")),
        *((4, layout) for layout in ("pp=4,schedule=zero_bubble", "pp=2,virtual_stages=2,schedule=interleaved,cp=2")),
        (8, "tp=2,pp=2,cp=2"),
    ],
)
def test_several_gpus(tmp_path: Path, ranks: int, layout: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = [*launch, "-m", "bench.parity", "--device", "cuda", "--layout", layout, "--out", str(tmp_path)]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0
