"""`dovetail doctor`: versions, devices, chosen kernels, and a self-test of a few seconds."""

import argparse
import importlib.metadata
import os
import platform

import torch

from dovetail.kernels import reference
from dovetail.kernels.registry import kernels_for
from dovetail.launch.streams import put
from dovetail.nn.fused_head import combine
from dovetail.parallel.process_group import pick_device

PACKAGES = ("dovetail", "torch", "transformers", "safetensors", "pydantic", "numpy")
EXTRAS = (
    "gguf",
    "accelerate",
    "pillow",
    "torchvision",
    "flash-attn-4",
    "quack-kernels",
    "pyarrow",
    "wandb",
    "tensorboard",
)
BF16_ERROR = 0.02  # relative to the largest value; one rounding is 0.004


def run(args: argparse.Namespace) -> int:
    """Print what is here; 1 if the self-test fails. Under a launcher rank 0 prints, and any other whose self-test fails."""
    device = pick_device(args.device)
    lines = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    lines["extras"] = ", ".join(name for name in EXTRAS if _version(name) != "missing") or "none"
    lines["devices"] = _devices()
    lines["chosen"] = str(device)
    kernels = kernels_for(device).describe()
    lines["kernels"] = ", ".join(f"{op}: {home}" for op, home in kernels.items())
    errors = {
        str(dtype).removeprefix("torch."): _product_error(device, dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    worst = max(errors.values())
    lines["self-test"] = ", ".join(f"logits in {name}: error {error:.1e}" for name, error in errors.items())
    if worst <= BF16_ERROR and os.environ.get("RANK", "0") != "0":
        return 0
    put("".join(f"{name:<13}{value}\n" for name, value in lines.items()))
    put("all well\n" if worst <= BF16_ERROR else f"the self-test failed: {worst:.1e} > {BF16_ERROR}\n")
    return 0 if worst <= BF16_ERROR else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _devices() -> str:
    """The accelerators that torch sees, or the processor's threads."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return f"cpu only, {torch.get_num_threads()} threads"
    module = torch.get_device_module(found)
    return ", ".join(module.get_device_name(i) for i in range(module.device_count()))


def _product_error(device: torch.device, dtype: torch.dtype) -> float:
    """How far the head's logits on `device` and their log-sum-exp are from the reference in float64, relative to the largest."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256, dtype=torch.float64), torch.randn(512, 256, dtype=torch.float64)
    targets, kernels = torch.arange(64), kernels_for(device)
    here = (x.to(device, dtype), weight.to(device, dtype))
    z: torch.Tensor | None = kernels.logits(*here)
    stats = kernels.vocab_stats(z, targets.to(device))
    if kernels.head is not None and kernels.head.takes(*here):
        z, stats = kernels.head.logit_stats(*here, targets.to(device), keep=True)
    assert z is not None
    exact = reference.logits(x, weight)
    ours, true = (combine(each[None])[1] for each in (stats, reference.vocab_stats(exact, targets)))
    pairs = ((z, exact), (ours.peak + ours.total.log(), true.peak + true.total.log()))
    return max(float((got.to("cpu", torch.float64) - true).abs().max() / true.abs().max()) for got, true in pairs)
