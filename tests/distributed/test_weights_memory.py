"""Loading a large checkpoint costs a rank its own pieces, in bytes read and in host memory; streaming costs a bucket."""

import ctypes
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dovetail.engine.sharding import shard_over_data
from dovetail.layout import Layout
from dovetail.mesh import Mesh
from dovetail.weights.load import load
from dovetail.weights.pieces import held
from dovetail.weights.reader import CheckpointReader
from dovetail.weights.stream import stream
from tests.checkpoints import decoder_on, write_tiny
from tests.harness import run

MIB = 2**20
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 8190, "head_dim": 512}
BUCKET = 16 * MIB
M_MMAP_THRESHOLD = -3  # glibc's mallopt


def write_large(path: Path, *, tied: bool = False) -> int:
    """The tiny checkpoint's config with large sizes, and a sparse file of zeros that fits it; its size in bytes."""
    write_tiny(path, "llama", tied=tied)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **LARGE}))
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
    return {r.checkpoint_name: r.checkpoint_shape for p in held(model, Mesh.solo()) for r in p.regions}


def resident(key: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _load_and_stream(source: Path, layout: Layout) -> dict[str, int]:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)  # give freed blocks back at once, so that only live ones count
    mesh = Mesh.build(layout)
    model = decoder_on(source, replace(mesh, device=torch.device("meta")))
    shard_over_data(model, mesh, torch.float32)
    reader = CheckpointReader(source)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = resident("VmRSS")
    model.to_empty(device="cpu")
    load(model, reader, mesh)
    figures = {"load": resident("VmHWM") - before, "read": reader.bytes_read}
    figures["own"] = sum(param.local.numel() * 4 for param in held(model, mesh))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    for _ in stream(model, mesh, bucket_bytes=BUCKET, dtype_of=lambda _: torch.bfloat16):
        pass
    return {**figures, "stream": resident("VmHWM") - before}


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (Layout(tp=2), False),
        (Layout(pp=2), False),
        (Layout(pp=2), True),
        pytest.param(Layout(tp=2), True, marks=pytest.mark.soak),
    ],
)
def test_a_rank_pays_for_its_own_pieces(tmp_path: Path, layout: Layout, tied: bool) -> None:
    """Slices of every tensor, or a stage's tensors; of a tied table both ends of a pipeline have all."""
    size = write_large(tmp_path / "source", tied=tied)
    assert size >= 1000 * MIB
    width, vocab = LARGE["hidden_size"], LARGE["vocab_size"]
    table, tensor = 4 * width * vocab, 4 * width * max(vocab, LARGE["intermediate_size"])
    held_in_all = size + (table if tied and layout.pp > 1 else 0)
    # In bfloat16: a rank's share of a tensor and its longest share from each rank, which gloo has a second time; then
    # a whole one, and the one before, which the consumer still holds. A stage's tensor is all of that stage's share.
    share = 1 / layout.tp
    streamed = (share + 2 * 2 * share + 2) * tensor / 2
    for figures in run(2, _load_and_stream, tmp_path / "source", layout):
        assert 0.49 * held_in_all < figures["own"] < 0.51 * held_in_all
        assert figures["own"] * 0.9 < figures["read"] <= 1.1 * figures["own"]
        assert figures["load"] <= 1.2 * (figures["own"] + tensor)
        assert figures["stream"] <= 1.1 * streamed < 0.5 * size / 2
