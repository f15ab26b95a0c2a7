"""Peak throughput and memory of a device."""

import importlib
import importlib.util
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress

import torch

from dovetail.system import resident_memory

# Dense bf16 FLOP/s by datasheet.
PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA B200": 2250e12, "NVIDIA L40S": 362e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """bf16; None: unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for start, peak in PEAK_FLOPS.items() if name.startswith(start)), None)


def memory_of(device: torch.device) -> int | None:
    """Bytes; None for a CPU."""
    return (
        None
        if device.type == "cpu"
        else int(torch.get_device_module(device).mem_get_info(device)[1])
    )


def usage(device: torch.device) -> dict[str, float]:
    """GiB of memory; per cent of the last second that a GPU was busy, if pynvml is installed."""
    sizes = {"host": resident_memory()}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        sizes |= {
            "allocated": module.memory_allocated(device),
            "reserved": module.memory_reserved(device),
        }
    row = {f"memory/{name}_gib": size / 2**30 for name, size in sizes.items() if size is not None}
    if device.type == "cuda" and importlib.util.find_spec("pynvml") is not None:
        # no driver, a MIG slice, another pynvml
        with suppress(importlib.import_module("pynvml").NVMLError, RuntimeError, ImportError):
            row["gpu_utilization"] = float(torch.cuda.utilization(device))
    return row


def peak_memory_gib(device: torch.device) -> float:
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
