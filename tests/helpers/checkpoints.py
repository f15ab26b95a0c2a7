"""Tiny Hugging Face checkpoints of every family, written by transformers, and our models that belong to them."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dovetail.arch.registry import spec_from_config
from dovetail.batch.routing import RoutingTrace
from dovetail.engine.fsdp import shard_over_data
from dovetail.kernels.registry import KernelSet
from dovetail.nn.decoder import Decoder
from dovetail.nn.model import StageRange
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.partition import partition

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SIZES = {
    "vocab_size": 51,  # divides by nothing, so tp pads it and FSDP2's rows are uneven
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}


def write_tiny(
    path: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    shard_size: str = "1GB",
    **sizes: Any,
) -> Path:
    """A randomly initialized checkpoint with a few files beside the weights."""
    torch.manual_seed(0)
    config = CONFIGS[family](**{**SIZES, "tie_word_embeddings": tied, **sizes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    model.save_pretrained(path, max_shard_size=shard_size)
    (path / "tokenizer.json").write_text('{"not": "read here"}')
    (path / "chat_template.jinja").write_text("{{ messages }}\n")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}\n")
    return path


def decoder_on(path: Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Decoder:
    """This rank's stages of the checkpoint's model, its weights not yet loaded; on the meta device if the mesh is."""
    spec = spec_from_config(json.loads((path / "config.json").read_text()))
    ranges, pp = partition(spec, mesh.layout), mesh["pp"]
    cut = StageRange(ranges[pp.rank :: pp.size], first=pp.rank == 0, last=pp.rank == pp.size - 1)
    with torch.device(mesh.device):
        model = Decoder(spec, mesh, KernelSet(), cut=cut).to(dtype)
    for param in model.parameters():
        torch.nn.init.constant_(param, float("nan"))
    return model


def engine_model(
    path: Path, layout: str, dtype: torch.dtype, *, wrap: bool = True
) -> tuple[Decoder, Mesh]:
    """The same cut over the ranks of the default process group."""
    mesh = Mesh.build(Layout.parse(layout))
    model = decoder_on(path, mesh, dtype)
    if wrap:
        shard_over_data(model, mesh, dtype)
    return model, mesh


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of an HF directory, in the order of its files, through safetensors itself."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(
            actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def digests(path: Path, *, weights: bool = True) -> dict[str, str]:
    """SHA-256 of every file, with or without the weights and their index."""
    return {
        file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and (weights or "safetensors" not in file.name)
    }


def read_routes(path: Path) -> list[RoutingTrace]:
    """What `run.metrics.write_routes` wrote."""
    tensors = load_file(path)
    layers, starts = tuple(tensors["layers"].tolist()), tensors["starts"].tolist()
    return [
        RoutingTrace(layers, tensors["indices"][a:b].to(torch.int32), tensors["valid"][a:b])
        for a, b in pairwise(starts)
    ]
