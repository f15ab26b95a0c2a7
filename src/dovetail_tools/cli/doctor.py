"""`dovetail doctor`."""

import argparse
import importlib.metadata
import os
import platform

import torch

import dovetail
from dovetail.kernels import reference
from dovetail.kernels.registry import kernels_for
from dovetail.launch.process import put
from dovetail.nn.heads import combine
from dovetail.parallel.process_group import pick_device

PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "numpy")
EXTRAS = (
    "gguf", "accelerate", "pillow", "torchvision", "flash-attn-4", "quack-kernels", "pyarrow", "wandb", "tensorboard",
    "mlflow-skinny", "trackio", "swanlab",
)  # fmt: skip
BF16_ERROR = 0.02  # relative to the maximum; one rounding is 0.004


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if the self-test fails."""
    device = pick_device(args.device)
    lines = {"python": platform.python_version(), "dovetail": dovetail.__version__}
    lines |= {name: _version(name) for name in PACKAGES}
    lines["extras"] = ", ".join(name for name in EXTRAS if _version(name) != "missing") or "none"
    lines["devices"] = _devices()
    lines["chosen"] = str(device)
    lines["kernels"] = ", ".join(
        f"{op}: {module}" for op, module in kernels_for(device).describe().items()
    )
    errors = {dtype: _relative_error(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    texts = (
        f"logits in {str(dtype).removeprefix('torch.')}: error {error:.1e}"
        for dtype, error in errors.items()
    )
    lines["self-test"] = ", ".join(texts)
    passed = (worst := max(errors.values())) <= BF16_ERROR
    if not passed or os.environ.get("RANK", "0") == "0":
        put("".join(f"{name:<13}{value}\n" for name, value in lines.items()))
        put("all well\n" if passed else f"the self-test failed: {worst:.1e} > {BF16_ERROR}\n")
    return 0 if passed else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _devices() -> str:
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        return f"cpu only, {torch.get_num_threads()} threads"
    module = torch.get_device_module(accelerator)
    return ", ".join(module.get_device_name(i) for i in range(module.device_count()))


def _relative_error(device: torch.device, dtype: torch.dtype) -> float:
    """Logits and log-sum-exp against float64."""
    torch.manual_seed(0)
    x = torch.randn(64, 256, dtype=torch.float64)
    weight = torch.randn(512, 256, dtype=torch.float64)
    targets = torch.arange(64)
    kernels = kernels_for(device)
    inputs = (x.to(device, dtype), weight.to(device, dtype))
    z: torch.Tensor | None = kernels.logits(*inputs)
    stats = kernels.vocab_stats(z, targets.to(device))
    if kernels.head is not None and kernels.head.takes(*inputs):
        z, stats = kernels.head.logit_stats(*inputs, targets.to(device), keep=True)
    assert z is not None
    exact = reference.logits(x, weight)
    ours, true = (combine(part[None])[1] for part in (stats, reference.vocab_stats(exact, targets)))
    pairs = ((z, exact), (ours.peak + ours.total.log(), true.peak + true.total.log()))
    return max(
        float((got.to("cpu", torch.float64) - true).abs().max() / true.abs().max())
        for got, true in pairs
    )
