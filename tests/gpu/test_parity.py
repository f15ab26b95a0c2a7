"""The parity script of bench/ on a CUDA device: float32 within 1e-5 of transformers, bfloat16 within 1.2 of its error."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_one_gpu(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "bench.parity", "--device", "cuda", "--out", str(tmp_path)]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *((2, layout) for layout in ("tp=2", "dp=2", "pp=2", "cp=2", "cp=2,cp_mode=gather")),
        *(
            (4, layout)
            for layout in (
                "pp=4,schedule=zero_bubble",
                "pp=2,virtual_stages=2,schedule=interleaved,cp=2",
            )
        ),
        (8, "tp=2,pp=2,cp=2"),
    ],
)
def test_several_gpus(tmp_path: Path, ranks: int, layout: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    run = [
        *launch,
        "-m",
        "bench.parity",
        "--device",
        "cuda",
        "--layout",
        layout,
        "--out",
        str(tmp_path),
    ]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0


OWN_GPU = 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec "$0" "$@"'


@pytest.mark.parametrize("shown", [OWN_GPU, OWN_GPU.replace("$LOCAL_RANK", "0")])
def test_ranks_that_see_one_gpu_each(tmp_path: Path, shown: str) -> None:
    """Its own: all is as where they see all. The same: refused at once, by name."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    job = [
        sys.executable,
        "-m",
        "bench.parity",
        "--device",
        "cuda",
        "--layout",
        "tp=2",
        "--out",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [*launch, "sh", "-c", shown, *job], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if shown == OWN_GPU:
        assert ended.returncode == 0, ended.stderr[-4000:]
    else:
        assert ended.returncode != 0
        assert "have the same cuda device" in ended.stderr, ended.stderr[-4000:]
