"""`dovetail serve`: the embedded sampler as a server."""

import argparse
import threading

import torch

import dovetail
from dovetail.arch.spec import BY_LENGTH
from dovetail.errors import ConfigError
from dovetail.factory.engine import open_weights
from dovetail.factory.layouts import max_positions
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.tokenizer import stop_ids
from dovetail.launch.engines import KEY, engine_key
from dovetail.launch.process import complain, tell
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import pick_device
from dovetail.rollout.native import NativeSampler, SamplerOptions
from dovetail.rollout.server import SamplerServer
from dovetail.rollout.server_http import HttpServer
from dovetail.weights.hf_directory import Pretrained


def run(args: argparse.Namespace) -> None:
    dtype, device = getattr(torch, args.dtype), pick_device(args.device)
    address, used = (args.host, args.port), args.gpu_memory_utilization
    server = make_server(args.model, device, dtype, address, key=engine_key(), utilization=used)
    if server.key is None and not args.host.startswith("127."):
        complain(f"dovetail: note: clients of {args.host} may replace weights; set {KEY} here and for the trainer\n")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell(f"serving {args.model} at {server.url}, up to {server.engine.max_length} tokens of prompt and completion\n")
    server.engine.run()


def make_server(
    model: str,
    device: torch.device,
    dtype: torch.dtype,
    address: tuple[str, int],
    *,
    key: str | None = None,
    utilization: float = 0.8,
    options: SamplerOptions | None = None,
) -> HttpServer:
    """key: that clients must send. utilization: share of a GPU's memory."""
    source, mesh = Pretrained.open(model), Mesh.solo(device)
    backend_layout(source, Layout(), "native")  # refuses what it does not run
    try:
        server = HttpServer(address, model=model, eos=stop_ids(source, None), key=key, version=dovetail.__version__)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {address[0]} --port {address[1]}: {error}; give others") from error
    sampler = make_sampler(source, mesh, dtype, options=options)
    assert isinstance(sampler, NativeSampler)
    sampler.load(open_weights(source, mesh))
    rope, lengths = sampler.spec.rope, [max_positions(source.config, "native")]
    if rope.kind in BY_LENGTH:
        lengths.append(rope.max_positions)
    longest = min((length for length in lengths if length is not None), default=None)
    server.engine = SamplerServer(sampler, longest, utilization)
    return server
