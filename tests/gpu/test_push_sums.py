"""Sums of weights on a GPU: the kernel against the definition, and at the speed of memory."""

import time

import pytest
import torch

from dovetail.inference_servers.checksums import checksums_of
from tests.helpers.push_sums import DTYPES, SIZES, tensor
from tests.helpers.sum_words import pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLOOR = 1e12  # bytes a second; 15 GB in 15 ms


def test_a_gpu_and_a_cpu_agree() -> None:
    pytest.importorskip("triton")
    assert all(got == expected for got, expected in pairs("cuda"))
    tensors = [tensor(size, dtype) for size in SIZES for dtype in DTYPES]
    tensors.append(tensor(99, torch.int8)[3:])
    assert checksums_of([one.cuda() for one in tensors]) == checksums_of(tensors)


def test_one_read_of_the_memory() -> None:
    pytest.importorskip("triton")
    big = [torch.zeros(1 << 29, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    checksums_of(big)
    begun = time.monotonic()
    for _ in range(5):
        checksums_of(big)
    rate = 5 * sum(one.nbytes for one in big) / (time.monotonic() - begun)
    assert rate > FLOOR, f"{rate / 1e12:.2f} TB/s"
