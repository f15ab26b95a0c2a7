"""Peak throughput and memory of a device."""

import resource
import sys
from collections.abc import Mapping

import torch

# Dense bf16 operations per second by datasheet, by the start of the device's name.
PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s; None for a CPU and unlisted GPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for start, peak in PEAK_FLOPS.items() if name.startswith(start)), None)


def memory_of(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory; None for a CPU."""
    return None if device.type == "cpu" else int(torch.get_device_module(device).mem_get_info(device)[1])


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process, allocated or resident on the host."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
