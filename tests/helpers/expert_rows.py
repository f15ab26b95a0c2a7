"""Rows of experts for kernels."""

import torch

GROUPS = {
    "empty ones": (3, 0, 5, 0),
    "first ones empty": (0, 0, 4, 1),
    "one": (7,),
    "no tokens": (0, 0),
}


def experts(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(sum(sizes), 16, dtype=torch.float64, generator=generator)
        .to(device, dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(len(sizes), 16, 8, dtype=torch.float64, generator=generator)
        .to(device, dtype)
        .requires_grad_()
    )
    return x, weight, torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
