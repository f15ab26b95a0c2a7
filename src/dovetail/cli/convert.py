"""`dovetail convert`."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.status import Status

from dovetail.checkpoint.conversion import convert_to_hf, convert_to_sharded
from dovetail.cli.common import mesh_of
from dovetail.factory.engine import make_model, open_weights
from dovetail.factory.layouts import check_layout
from dovetail.launch.process import tell
from dovetail.launch.progress import Progress, calling_every
from dovetail.nn.model import StagedModel
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained, locate, stored_head
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import NameRules
from dovetail.weights.safe_paths import refuse_occupied, refuse_unwritable

SHOW_SECONDS = 0.5


def run(args: argparse.Namespace, progress: Progress) -> None:
    mesh = mesh_of(args)
    progress.phase("run")
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    to = Path(args.destination)
    with agreed(mesh):
        refuse_occupied(to)
        refuse_unwritable(to, "the directory")
    if args.to == "hf":
        with agreed(mesh):
            path = locate(args.source)
        with progressing(args, mesh) as sources:
            convert_to_hf(path, to, mesh, dtype=dtype, watch=sources.append)
        return
    with agreed(mesh):
        source = Pretrained.open(args.source)
        check_layout(source.spec, mesh.layout)
    reader = open_weights(source, mesh)
    head = stored_head(reader, source)
    kind = "value_without_bias" if "score.bias" in head.fresh else head.kind  # as the source

    def model_on(imagined: Mesh) -> StagedModel:
        return make_model(source, imagined, torch.float32, reader, kind)

    ignore = (*head.ignore, *source.spec.ignored)
    rules: NameRules = {"aliases": head.aliases, "ignore": ignore}
    with progressing(args, mesh) as sources:
        convert_to_sharded(
            source.path, to, mesh.layout, model_on, mesh, dtype=dtype, watch=sources.append, **rules
        )


@contextmanager
def progressing(args: argparse.Namespace, mesh: Mesh) -> Iterator[list[TensorSource]]:
    """Shows bytes read, then what was written."""
    sources: list[TensorSource] = []
    is_first = mesh["world"].rank == 0
    console = RichConsole(stderr=True)
    with ExitStack() as stack:
        if is_first and console.is_terminal:
            bar = stack.enter_context(Status("converting", console=console))

            def show() -> None:
                bar.update(
                    f"converting: {sum(source.bytes_read for source in sources) / 1e9:.2f} GB read"
                )

            stack.enter_context(calling_every(SHOW_SECONDS, show))
        yield sources
    if is_first:
        files = [path for path in Path(args.destination).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        tell(f"wrote {len(files)} files ({size / 1e9:.3g} GB) to {args.destination}\n")
