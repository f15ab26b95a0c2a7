"""`dovetail serve`: the embedded sampler as a server. Checks come before torch is imported."""

import argparse
import importlib
from pathlib import Path

from dovetail import system
from dovetail.cli.preflight import read_model
from dovetail.errors import ConfigError
from dovetail.launch.inference_servers import KEY, server_key
from dovetail.launch.process import complain, tell
from dovetail.serving.extra import require_serve
from dovetail.weights.safe_paths import refuse_without_adapter


def run(args: argparse.Namespace) -> None:
    require_serve("dovetail serve")
    read_model(args.model)
    if args.adapter is not None:
        refuse_without_adapter(Path(args.adapter))
    key = server_key()
    system.raise_open_files_limit()
    listen = importlib.import_module("dovetail.serving.http_server").listen
    try:
        listener = listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        where = f"--host {args.host} --port {args.port}"
        raise ConfigError(f"{where}: {error}; give others") from error
    if key is None and not args.host.startswith("127."):
        note = f"clients of {args.host} may replace weights"
        complain(f"dovetail: note: {note}; set {KEY} here and for the trainer\n")
    torch = importlib.import_module("torch")
    server = importlib.import_module("dovetail.factory.serving").make_server(
        args.model,
        importlib.import_module("dovetail.parallel.process_group").pick_device(args.device),
        getattr(torch, args.dtype),
        listener,
        key=key,
        utilization=args.gpu_memory_utilization,
        push_directory=Path(args.push_dir),
        adapter=args.adapter,
    )
    server.start()
    longest = f"up to {server.engine.max_length} tokens of prompt and completion"
    tell(f"serving {args.model} at {server.url}, {longest}\n")
    server.run()
