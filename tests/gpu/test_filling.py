"""Tensors on the device are filled from files as those on the host are, by threads that share one buffer each."""

from pathlib import Path

import pytest
import torch

from dovetail.parallel.placement import Slices
from dovetail.weights.parallel_read import BUFFER_BYTES, ReadJob, job_parts, run_jobs
from dovetail.weights.safetensors import TensorFile, TensorFileWriter, TensorSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, WIDTH = 5000, 2048  # several times a buffer, in both dtypes


def test_rectangles_arrive_whole_in_any_dtype_and_order(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    names = [f"t{i}" for i in range(6)]
    dtypes = [torch.float32, torch.bfloat16] * 3
    tensors = {
        n: torch.randn(ROWS, WIDTH).to(dtype) for n, dtype in zip(names, dtypes, strict=True)
    }
    assert min(x.numel() * x.element_size() for x in tensors.values()) > 4 * BUFFER_BYTES
    writer = TensorFileWriter(
        tmp_path / "x", [TensorSpec(n, x.dtype, (ROWS, WIDTH)) for n, x in tensors.items()]
    )
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    file = TensorFile(tmp_path / "x")
    whole: Slices = ((0, ROWS), (0, WIDTH))
    columns: Slices = ((0, ROWS), (WIDTH // 2, WIDTH))
    for out_dtype in (torch.float32, torch.bfloat16):
        jobs: list[ReadJob] = []
        found, cut, turned = {}, {}, {}
        for name, tensor in tensors.items():
            found[name] = torch.full((ROWS, WIDTH), torch.nan, dtype=out_dtype, device=device)
            cut[name] = torch.full((ROWS, WIDTH // 2), torch.nan, dtype=out_dtype, device=device)
            turned[name] = torch.full((WIDTH, ROWS), torch.nan, dtype=out_dtype, device=device)
            for slices, out in (
                (whole, found[name]),
                (columns, cut[name]),
                (whole, turned[name].T),
            ):
                jobs += [
                    lambda room, n=name, s=part, o=place: file.fill(n, s, o, room)  # type: ignore[misc]
                    for part, place in job_parts(slices, out, tensor.dtype)
                ]
        run_jobs(jobs, device)
        for name, tensor in tensors.items():
            expected = tensor.to(device).to(out_dtype)
            assert torch.equal(found[name], expected), name
            assert torch.equal(cut[name], expected[:, WIDTH // 2 :]), name
            assert torch.equal(turned[name].T, expected), name
