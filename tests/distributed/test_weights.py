"""HF -> model -> HF, HF -> sharded -> HF and the stream, over layouts: the same names, dtypes and bytes."""

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dovetail.batch.packed import PackedBatch
from dovetail.checkpoint.conversion import convert_to_hf, convert_to_sharded
from dovetail.checkpoint.reader import ShardedReader, open_checkpoint
from dovetail.checkpoint.writer import save_sharded
from dovetail.engine.fsdp import shard_over_data
from dovetail.engine.native import Engine
from dovetail.errors import CheckpointError
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import CheckpointSource
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import load
from dovetail.weights.safe_paths import auxiliary_files
from dovetail.weights.save import save
from dovetail.weights.shards import ExportRules, local_params
from dovetail.weights.stream import stream
from tests.helpers.checkpoints import (
    assert_same_tensors,
    decoder_on,
    digests,
    engine_model,
    tensors_of,
    write_tiny,
)
from tests.helpers.harness import run

LAYOUTS = (
    "tp=1,dp=1",
    "tp=2,dp=1",
    "tp=4,dp=1",
    "tp=1,dp=2",
    "tp=2,dp=2",
    "pp=2",
    "tp=2,pp=2",
    "pp=2,cp=2",
    "cp=4",
)
CUT = (
    "tp=2,dp=1",
    "tp=1,dp=2",
    "pp=2",
)  # on which every other model goes; on the others one, in turn
MODELS = (  # family, dtype, tied
    ("llama", torch.bfloat16, False),
    ("qwen2", torch.float32, True),
    ("qwen3", torch.bfloat16, True),
    ("mistral", torch.float32, False),
)
SMALL_BUCKET = 2000  # bytes; several buckets even for a tiny model
SMALL_SHARD = 9000


def _either_tied(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Cases that end in whether tables are tied; `make soak` has them the other way, too."""
    return [
        *cases,
        *(pytest.param(*case, not tied, marks=pytest.mark.soak) for *case, tied in cases),
    ]


def _loaded(
    source: Path, layout: str, *, wrap: bool = True
) -> tuple[nn.Module, Mesh, TensorSource]:
    model, mesh = engine_model(source, layout, torch.float32, wrap=wrap)
    reader = open_checkpoint(source, mesh)
    load(model, reader, mesh)
    return model, mesh, reader


def _through_model(
    source: Path, out: Path, layout: str, wrap: bool
) -> tuple[int, int, dict[str, Tensor]]:
    model, mesh, reader = _loaded(source, layout, wrap=wrap)
    for param in local_params(model, mesh):
        assert not param.local.isnan().any(), param.name  # padding too
    read, own = (
        reader.bytes_read,
        sum(r.num_elements for p in local_params(model, mesh) for r in p.regions),
    )
    streamed = dict(
        stream(
            model,
            mesh,
            bucket_bytes=SMALL_BUCKET,
            dtype_of=reader.dtype,
            checkpoint_names=reader.names,
        )
    )
    assert list(streamed) == list(reader.names)
    auxiliary = auxiliary_files(source)
    rules: ExportRules = {"dtype_of": reader.dtype, "checkpoint_names": reader.names}
    save(model, out / "hf", mesh, auxiliary=auxiliary, shard_bytes=SMALL_SHARD, **rules)
    save_sharded(model, out, mesh, auxiliary=auxiliary, step=7, **rules)
    return read, own, streamed


@pytest.mark.parametrize(
    ("layout", "family", "dtype", "tied"),
    [
        pytest.param(
            layout,
            *model,
            marks=[pytest.mark.soak] * ((i + j) % (2 if layout in CUT else len(MODELS)) > 0),
        )
        for j, layout in enumerate(LAYOUTS)
        for i, model in enumerate(MODELS)
    ],
)
def test_through_the_model(
    tmp_path: Path, family: str, dtype: torch.dtype, tied: bool, layout: str
) -> None:
    source = write_tiny(tmp_path / "source", family, dtype=dtype, tied=tied)
    expected = tensors_of(source)
    for read, own, streamed in run(
        Layout.parse(layout).num_ranks, _through_model, source, tmp_path, layout, True
    ):
        assert read <= 1.1 * own * dtype.itemsize
        assert_same_tensors(streamed, expected)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert_same_tensors(tensors_of(tmp_path / "hf"), expected)
    assert digests(tmp_path / "hf", weights=False) == digests(source, weights=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    sharded = ShardedReader(tmp_path / "step_000007")
    sharded.verify()
    assert os.readlink(tmp_path / "step_000007").startswith("step_000007.")
    assert_same_tensors({name: sharded.read(name) for name in sharded.names}, expected)


@pytest.mark.parametrize(
    ("layout", "tied"),
    _either_tied([("tp=4,dp=1", True), ("tp=2,dp=2", False), ("pp=2,dp=2", True)]),
)
def test_a_rank_whose_rows_are_all_padding_holds_zeros(
    tmp_path: Path, tied: bool, layout: str
) -> None:
    """Five ids: with tp = 4 the last rank has none of them, with tp = 2 and dp = 2 the last shard has none."""
    source = write_tiny(tmp_path / "source", "llama", tied=tied, vocab_size=5)
    for _, _, streamed in run(4, _through_model, source, tmp_path, layout, True):
        assert_same_tensors(streamed, tensors_of(source))


@pytest.mark.parametrize("layout", ["tp=2,dp=2", "tp=1,dp=2"])
def test_a_model_that_is_not_wrapped(tmp_path: Path, layout: str) -> None:
    source = write_tiny(tmp_path / "source", "qwen2", tied=True)
    for _, _, streamed in run(
        Layout.parse(layout).num_ranks, _through_model, source, tmp_path, layout, False
    ):
        assert_same_tensors(streamed, tensors_of(source))


def _cut_and_load(source: Path, out: Path, cut: str, layout: str) -> dict[str, Tensor]:
    mesh = Mesh.build(Layout.parse(layout))
    convert_to_sharded(
        source, out / "cut", Layout.parse(cut), lambda imagined: decoder_on(source, imagined), mesh
    )
    model, mesh, reader = _loaded(out / "cut", layout)
    convert_to_hf(out / "cut", out / "hf", mesh, shard_bytes=SMALL_SHARD)
    return dict(stream(model, mesh, dtype_of=reader.dtype, checkpoint_names=reader.names))


@pytest.mark.parametrize(
    ("cut", "layout", "tied"),
    _either_tied(
        [
            ("tp=2,dp=2", "tp=4,dp=1", False),
            ("tp=4,dp=1", "tp=1,dp=2", True),
            ("tp=1,dp=3", "tp=2,dp=1", False),
            ("pp=2,cp=2,dp=1", "tp=4", True),
            ("tp=2,dp=2", "pp=2,cp=2", True),
            ("tp=2,cp=2,dp=1", "tp=2,pp=2", False),
        ]
    ),
)
def test_any_layout_reads_any_other(tmp_path: Path, cut: str, layout: str, tied: bool) -> None:
    source = write_tiny(
        tmp_path / "source", "qwen2", dtype=torch.bfloat16, tied=tied, shard_size="8KB"
    )
    expected = tensors_of(source)
    for streamed in run(
        Layout.parse(layout).num_ranks, _cut_and_load, source, tmp_path, cut, layout
    ):
        assert_same_tensors(streamed, expected)
    assert_same_tensors(tensors_of(tmp_path / "hf"), expected)
    assert digests(tmp_path / "hf", weights=False) == digests(source, weights=False)


def _messages(source: Path, layout: str, broken_on: int | None) -> str:
    model, mesh = engine_model(source, layout, torch.float32)
    before = [param.local.clone() for param in local_params(model, mesh)]
    path = source / "nowhere" if broken_on == mesh["world"].rank else source
    with pytest.raises(CheckpointError) as caught:
        load(model, open_checkpoint(path, mesh), mesh)
    for param, old in zip(local_params(model, mesh), before, strict=True):
        assert torch.equal(param.local.view(torch.int32), old.view(torch.int32)), (
            f"{param.name} was touched"
        )
    return str(caught.value)


@pytest.mark.parametrize("layout", ["tp=2,dp=2", "pp=2,cp=2"])
def test_all_mistakes_are_named_together_on_every_rank(tmp_path: Path, layout: str) -> None:
    source = write_tiny(tmp_path / "source", "llama")
    tensors = tensors_of(source)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(24, 24, dtype=torch.int8)
    tensors["model.surprise"] = torch.zeros(2)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    first, *others = run(4, _messages, source, layout, None)
    assert all(other == first for other in others)
    assert "missing: model.norm.weight [24]" in first
    assert "mis-shaped: model.layers.0.mlp.down_proj.weight is [3, 4], expected [24, 40]" in first
    assert "wrong dtype: model.layers.1.self_attn.q_proj.weight is torch.int8" in first
    assert "extra: model.surprise [2]" in first


def test_one_rank_that_cannot_read_stops_all(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "llama")
    first, *others = run(2, _messages, source, "tp=2,dp=1", 1)
    assert others == [first]
    assert first.startswith("rank 1: ")
    assert "nowhere is not a directory" in first


def _flipped(source: Path) -> str:
    model, mesh = engine_model(source, "tp=2", torch.float32)
    with pytest.raises(CheckpointError) as caught:
        load(model, open_checkpoint(source, mesh), mesh)
    return str(caught.value)


def test_a_flipped_bit_is_refused_on_every_rank(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "llama")
    model_on = lambda mesh: decoder_on(source, mesh)  # noqa: E731
    convert_to_sharded(source, tmp_path / "cut", Layout(tp=2), model_on, Mesh.solo())
    file = tmp_path / "cut" / "pieces-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    first, other = run(2, _flipped, tmp_path / "cut")
    assert first == other
    assert file.name in first
    last = list(ShardedReader(tmp_path / "cut")._files[file.name].entries)[-1]
    assert last in first


def _write(model: nn.Module, out: Path, mesh: Mesh, sharded: bool) -> None:
    if sharded:
        save_sharded(model, out, mesh, auxiliary={}, step=1)
    else:
        save(
            model,
            out / "hf",
            mesh,
            auxiliary={},
            shard_bytes=SMALL_SHARD,
            bucket_bytes=SMALL_BUCKET,
        )


def _disk_full(source: Path, out: Path, failing: int, sharded: bool) -> str:
    model, mesh, _ = _loaded(source, "tp=2,dp=1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if mesh["world"].rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            _write(model, out, mesh, sharded)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_that_cannot_write_leaves_nothing_behind(tmp_path: Path, sharded: bool) -> None:
    source = write_tiny(tmp_path / "source", "llama")
    first, other = run(2, _disk_full, source, tmp_path, 1, sharded)
    assert first == other
    place = tmp_path / ("step" if sharded else "hf")
    assert re.search(rf"rank 1: {place}\S*: \[Errno 27\] File too large", first), first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _stream_after_scoring(source: Path) -> dict[str, Tensor]:
    """Scoring leaves some parameters unsharded, in the compute dtype; the stream must give the master weights."""
    mesh = Mesh.build(Layout.parse("tp=2"))
    model = decoder_on(source, mesh)
    shard_over_data(model, mesh, torch.bfloat16)
    reader = open_checkpoint(source, mesh)
    load(model, reader, mesh)
    Engine(model, mesh, CheckpointSource(reader.dtype, tuple(reader.names), {})).score(
        PackedBatch.pack([torch.arange(5), torch.arange(9), torch.arange(3)])
    )
    assert not all(isinstance(param, DTensor) for param in model.parameters())  # the trap is there
    return dict(stream(model, mesh))


def test_the_stream_gives_master_weights_after_scoring(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "llama")
    for streamed in run(2, _stream_after_scoring, source):
        assert_same_tensors(streamed, tensors_of(source))


def _both_tied_names(source: Path, out: Path, layout: str) -> str:
    model, mesh = engine_model(source, layout, torch.float32)
    reader = open_checkpoint(source, mesh)
    try:
        load(model, reader, mesh)
    except CheckpointError as error:
        return str(error)
    save(model, out, mesh, auxiliary={}, dtype_of=reader.dtype, checkpoint_names=reader.names)
    return ""


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
@pytest.mark.parametrize(
    "listed", ["model.embed_tokens.weight", "lm_head.weight", "both", "different"]
)
def test_tied_weights_under_the_names_that_the_source_lists(
    tmp_path: Path, listed: str, layout: str
) -> None:
    source = write_tiny(tmp_path / "source", "qwen2", tied=True)
    tensors = tensors_of(source)
    table = tensors.pop("model.embed_tokens.weight")
    names = (
        ("lm_head.weight", "model.embed_tokens.weight")
        if listed in ("both", "different")
        else (listed,)
    )
    tensors |= {name: table.clone() for name in names}
    if listed == "different":
        tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    first, other = run(2, _both_tied_names, source, tmp_path / "out", layout)
    assert first == other
    if listed == "different":
        assert "set tie_word_embeddings to false" in first
    else:
        assert not first
        assert_same_tensors(tensors_of(tmp_path / "out"), tensors)
