"""Tensors whose sums are known."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool)
SIZES = (0, 1, 7, 8, 9, 1023, 70_001)


def tensor(size: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(
        0,
        256,
        (size * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(size),
    )
    return raw.bool() if dtype is torch.bool else raw.view(dtype)
