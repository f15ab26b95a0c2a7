"""Large files of weights, and the memory of a process."""

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from dovetail.parallel.mesh import Mesh
from dovetail.weights.shards import local_params
from tests.helpers.checkpoints import decoder_on, write_tiny

MIB = 2**20
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "vocab_size": 8190,
    "head_dim": 512,
}
M_MMAP_THRESHOLD = -3  # glibc's mallopt
PEAKS = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no peaks of memory"
)


def write_large(path: Path, *, tied: bool = False, **sizes: int) -> int:
    """The tiny checkpoint's config with large sizes, and a sparse file of zeros that fits it; its size in bytes."""
    write_tiny(path, "llama", tied=tied)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **LARGE, **sizes}))
    model = decoder_on(path, Mesh.solo("meta"))
    header, end = {}, 0
    for name, shape in _shapes(model).items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        r.checkpoint_name: r.checkpoint_shape
        for p in local_params(model, Mesh.solo())
        for r in p.regions
    }


def resident(key: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
