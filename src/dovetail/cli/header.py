"""The first lines of `dovetail train`. Imports no torch."""

import json
import math
import os
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dovetail
from dovetail import system
from dovetail.parallel.layout import Layout
from dovetail.weights.safe_paths import INDEX, SINGLE

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

GPUS = Path("/proc/driver/nvidia/gpus")
GPU_NODES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "kfd", "dxg")  # in /dev
MAX_HEADER = 1 << 27  # bytes of a safetensors file's
TRAINED_BYTES = 16
MOMENT_BYTES = 8  # of a parameter: weight, gradient, two moments
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


def header(recipe: "Recipe", layout: Layout, device: str) -> str:
    trainer = recipe.trainer
    rollout = recipe.rollout
    samples = recipe.algorithm.samples
    path, parameters = Path(recipe.model.path), count_parameters(Path(recipe.model.path))
    facts = ", ".join(
        filter(None, (_family(path), f"{_short(parameters)} parameters" if parameters else ""))
    )
    rows = (
        recipe.data.train
        if isinstance(recipe.data.train, str)
        else f"{len(recipe.data.train)} sources"
    )
    held_out = f"; held out: {recipe.data.eval}" if isinstance(recipe.data.eval, str) else ""
    sampled = (
        f" with {rollout.samples_per_prompt} samples of at most {rollout.max_new_tokens} tokens"
        * samples
    )
    steps = f"{recipe.data.epochs:g} epochs" if recipe.data.epochs else str(trainer.steps)
    ranks = layout.num_ranks
    lines = {
        "model": f"{path}{f' ({facts})' if facts else ''}, {recipe.model.dtype}",
        "layout": f"{layout} ({ranks} rank{'s' * (ranks > 1)})",
        "devices": devices(device),
        "data": f"{rows}{held_out}",
        "steps": f"{steps} of {trainer.prompts_per_step} rows{sampled}",
        "memory": _memory(recipe, layout, parameters),
        "run_dir": recipe.run_dir,
    }
    first = f"dovetail {dovetail.__version__}: {recipe.algorithm.name}\n"
    return first + "".join(f"{name:<9}{text}\n" for name, text in lines.items() if text)


def count_parameters(folder: Path) -> int:
    """Returns the number by safetensors headers; 0: unknown."""
    total = 0
    files = set(folder.glob("*.safetensors"))
    with suppress(
        OSError, ValueError, AttributeError, LookupError, TypeError
    ):  # others may lie there, too
        index = (
            json.loads((folder / INDEX).read_bytes())["weight_map"].values()
            if (folder / INDEX).exists()
            else ()
        )
        files = {folder / name for name in index} or (
            {folder / SINGLE} if (folder / SINGLE).exists() else files
        )
    for path in files:
        unreadable = (OSError, ValueError, struct.error, AttributeError, TypeError, RecursionError)
        with suppress(*unreadable), path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size <= MAX_HEADER:
                tensors: Mapping[str, Any] = json.loads(file.read(size))
                total += sum(math.prod(tensor.get("shape", (0,))) for tensor in tensors.values())
    return total


def visible_gpus() -> int | None:
    """None: unknown."""
    if not sys.platform.startswith("linux"):
        return None
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in given.split(",") if name.strip() not in ("", "-1")])
    dev = Path("/dev")
    if not any(True for pattern in GPU_NODES for _ in dev.glob(pattern)):
        return 0
    return len(list(dev.glob("nvidia[0-9]*"))) or None


def chosen_device(asked: str) -> str:
    """`auto` resolved without torch."""
    if asked == "auto":
        return "cuda" if visible_gpus() != 0 and system.gpu_memory() else "cpu"
    return asked


def devices(asked: str) -> str:
    device = chosen_device(asked)
    if device == "cpu":
        return f"cpu, {system.cores()} cores"
    if device != "cuda" or not (count := visible_gpus() or len(system.gpu_memory())):
        return device
    names = []
    for path in sorted(GPUS.glob("*/information"))[:count]:
        with suppress(OSError):
            fields = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
            names.append(fields.get("Model", "GPU").strip())
    names += names[-1:] * (count - len(names)) or ["GPU"] * count
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _memory(recipe: "Recipe", layout: Layout, parameters: int) -> str:
    if not parameters:
        return ""
    item = ITEM_BYTES[recipe.model.dtype]
    kept = TRAINED_BYTES - MOMENT_BYTES * recipe.trainer.offload_optimizer
    algorithm = recipe.algorithm
    shared = float(kept)
    whole = 0.0
    if algorithm.needs_critic:
        shared += kept
    if algorithm.needs_reference or (algorithm.samples and recipe.reference.path is not None):
        shared += item
    if algorithm.samples:
        whole = item / (recipe.rollout.layout.tp if recipe.rollout.layout else 1)
    gib = parameters * (shared / layout.num_ranks + whole) / 2**30
    sampler = ", sampler's weights" if algorithm.samples else ""
    return f"about {gib:.2g} GiB a rank for weights, gradients, moments{sampler}; activations come on top"


def _family(folder: Path) -> str:
    with suppress(OSError, ValueError, AttributeError):
        return str(json.loads((folder / "config.json").read_bytes()).get("model_type") or "")
    return ""


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
