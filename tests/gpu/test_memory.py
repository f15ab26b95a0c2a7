"""A device's memory is asked for once, not tensor by tensor, and no more of it is held than before."""

import pytest
import torch

from dovetail.memory import reserve_device_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = [(3 << 20) + 7, 1000, (25 << 20) + 512, 5 << 20] * 12  # bytes


def test_one_request_serves_many_tensors() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before, held = (
        torch.cuda.memory_stats(device)["num_device_alloc"],
        torch.cuda.memory_reserved(device),
    )
    reserve_device_memory(SIZES, device)
    tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in SIZES]
    stats = torch.cuda.memory_stats(device)
    assert stats["num_device_alloc"] - before <= 3, (
        "all large ones at once, and a block for the small"
    )
    assert torch.cuda.memory_reserved(device) - held <= sum(SIZES) + (6 << 20)
    del tensors
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= held
