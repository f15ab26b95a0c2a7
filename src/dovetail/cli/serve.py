"""`dovetail serve`."""

import argparse
import threading

import torch

import dovetail
from dovetail.factory.server import make_server
from dovetail.launch.engines import KEY, engine_key
from dovetail.launch.process import complain, tell
from dovetail.parallel.process_group import pick_device


def run(args: argparse.Namespace) -> None:
    dtype, device = getattr(torch, args.dtype), pick_device(args.device)
    address, version = (args.host, args.port), dovetail.__version__
    used = args.gpu_memory_utilization
    server = make_server(args.model, device, dtype, address, key=engine_key(), version=version, utilization=used)
    if server.key is None and not args.host.startswith("127."):
        complain(f"dovetail: note: clients of {args.host} may replace weights; set {KEY} here and for the trainer\n")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell(f"serving {args.model} at {server.url}, up to {server.engine.max_length} tokens of prompt and completion\n")
    server.engine.run()
