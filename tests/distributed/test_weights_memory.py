"""Loading a large checkpoint costs a rank its own pieces, in bytes read and in host memory; streaming costs a bucket."""

import ctypes
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dovetail.checkpoint.manifest import Manifest, StoredFile
from dovetail.checkpoint.reader import ShardedReader
from dovetail.engine.fsdp import shard_over_data
from dovetail.engine.native import Engine
from dovetail.factory.engine import from_pretrained
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_reader import HFReader, StoredRegion, StoredTensor
from dovetail.weights.load import load
from dovetail.weights.safe_paths import MANIFEST
from dovetail.weights.shards import local_params
from dovetail.weights.stream import stream
from tests.helpers.checkpoints import decoder_on
from tests.helpers.harness import run
from tests.helpers.weights_memory import LARGE, M_MMAP_THRESHOLD, MIB, PEAKS, resident, write_large

BUCKET = 16 * MIB
ROLE = "policy"


def _load_and_stream(source: Path, layout: Layout) -> dict[str, int]:
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, MIB
    )  # give freed blocks back at once, so that only live ones count
    mesh = Mesh.build(layout)
    model = decoder_on(source, replace(mesh, device=torch.device("meta")))
    shard_over_data(model, mesh, torch.float32)
    reader = HFReader(source)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = resident("VmRSS")
    model.to_empty(device="cpu")
    load(model, reader, mesh)
    figures = {"load": resident("VmHWM") - before, "read": reader.bytes_read}
    figures["own"] = sum(param.local.numel() * 4 for param in local_params(model, mesh))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    for _ in stream(model, mesh, bucket_bytes=BUCKET, dtype_of=lambda _: torch.bfloat16):
        pass
    return {**figures, "stream": resident("VmHWM") - before}


def _sparse_state(engine: Engine, path: Path) -> None:
    """A training checkpoint of zeros that takes no room: weights and moments of all ranks in one file. By one rank."""
    exports = engine.export_training(ROLE)
    specs = [spec for export in exports for spec in export.specs.values()]
    header: dict[str, object] = {}
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": "F32",
            "shape": spec.shape,
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
        region = StoredRegion("pieces", spec.name, tuple((0, n) for n in spec.shape), 0)
        tensors[spec.name] = StoredTensor(spec.dtype, spec.shape, (region,))
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text
    path.mkdir()
    with open(path / "pieces", "wb") as file:
        file.write(data)
        file.truncate(len(data) + end)
    pieces = {"pieces": StoredFile(len(data) + end, zlib.crc32(data))}
    (path / MANIFEST).write_bytes(Manifest({"tp": 1}, 1, tensors, pieces, {}, {}).dump())


def _load_state(source: Path, layout: Layout) -> dict[str, int]:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    engine = from_pretrained(source, layout=layout, device="cpu")
    own = sum(
        tensor.numel() * 4
        for tensors in engine.optimizer.state_tensors().values()
        for tensor in tensors.values()
    )
    own += sum(param.local.numel() * 4 for param in local_params(engine.model, engine.mesh))
    path = source.parent / "state"
    if engine.mesh["world"].rank == 0:
        _sparse_state(engine, path)
    else:
        engine.export_training(ROLE)
    gather_objects("", engine.mesh["world"])
    for tensors in engine.optimizer.state_tensors().values():
        for tensor in tensors.values():
            tensor.fill_(1.0)  # zeros that nobody has written take no memory yet
    before = resident("VmRSS") - own
    Path("/proc/self/clear_refs").write_text("5")
    reader = ShardedReader(path)
    engine.load_training(ROLE, reader, 3)
    return {"load": resident("VmHWM") - before, "own": own, "read": reader.bytes_read}


@PEAKS
@pytest.mark.parametrize(
    ("layout", "width"),
    [
        (Layout(tp=2), 512),
        pytest.param(Layout(tp=2), 2048, marks=pytest.mark.soak),
        pytest.param(Layout(pp=2), 2048, marks=pytest.mark.soak),
    ],
)
def test_training_state_costs_a_rank_its_own_pieces_too(
    tmp_path: Path, layout: Layout, width: int
) -> None:
    write_large(tmp_path / "source", num_hidden_layers=2, hidden_size=width)
    tensor = 4 * width * max(LARGE["vocab_size"], LARGE["intermediate_size"])
    for figures in run(2, _load_state, tmp_path / "source", layout):
        assert 0.9 * figures["own"] < figures["read"] <= 1.1 * figures["own"]
        assert figures["own"] > 0.4 * width * MIB
        assert figures["load"] <= 1.2 * (figures["own"] + tensor), figures


@PEAKS
@pytest.mark.parametrize(
    ("layout", "tied", "width"),
    [
        (Layout(pp=2), True, 1024),
        *(
            pytest.param(layout, tied, 2048, marks=pytest.mark.soak)
            for layout in (Layout(tp=2), Layout(pp=2))
            for tied in (False, True)
        ),
    ],
)
def test_a_rank_pays_for_its_own_pieces(
    tmp_path: Path, layout: Layout, tied: bool, width: int
) -> None:
    """Slices of every tensor, or a stage's tensors; of a tied table both ends of a pipeline have all."""
    size, vocab = (
        write_large(tmp_path / "source", tied=tied, hidden_size=width),
        LARGE["vocab_size"],
    )
    assert size >= width // 2 * MIB
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
