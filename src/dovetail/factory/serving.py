"""The embedded sampler of a model as a server over HTTP."""

import socket
from functools import partial
from pathlib import Path

import torch

import dovetail
from dovetail.arch.spec import BY_LENGTH
from dovetail.factory.engine import open_weights
from dovetail.factory.layouts import max_positions
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.tokenizer import banned_ids, load_tokenizer, stop_ids
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.native import NativeSampler
from dovetail.serving.app import Settings
from dovetail.serving.http_server import HttpServer
from dovetail.serving.sampler_server import SamplerServer
from dovetail.serving.text import Codec, Text
from dovetail.weights.hf_directory import Pretrained


def make_server(
    model: str,
    device: torch.device,
    dtype: torch.dtype,
    listener: socket.socket,
    *,
    key: str | None = None,
    utilization: float = 0.8,
    push_directory: Path | None = None,
    adapter: str | None = None,
) -> HttpServer:
    """key: that clients must send. utilization: share of a GPU's memory.

    adapter: PEFT's directory, whose products are added to the model's weights.

    push_directory: the only one whose files may be pushed; None: no file may.
    """
    source = Pretrained.open(model, adapter=adapter)
    mesh = Mesh.solo(device)
    backend_layout(source, Layout(), "native")  # refuses what it does not run
    sampler = make_sampler(source, mesh, dtype)
    assert isinstance(sampler, NativeSampler)
    sampler.load(open_weights(source, mesh))
    rope = sampler.spec.rope
    lengths = [max_positions(source.config, "native")]
    if rope.kind in BY_LENGTH:
        lengths.append(rope.max_positions)
    longest = min((length for length in lengths if length is not None), default=None)
    sampler_server = SamplerServer(sampler, longest, utilization, push_directory)
    settings = Settings(
        model=model,
        text=Text(partial(_load_codec, source)) if source.has_tokenizer else None,
        eos=stop_ids(source, None),
        key=key,
        version=dovetail.__version__,
    )
    return HttpServer(sampler_server, listener, settings)


def _load_codec(source: Pretrained) -> Codec:
    tokenizer = load_tokenizer(source)
    stops = stop_ids(source, tokenizer)
    return Codec(tokenizer, stops, banned_ids(source, tokenizer, None, stops))
