"""`dovetail convert`: an HF checkpoint to a sharded one and back, bit for bit."""

import argparse
from pathlib import Path

import torch

from dovetail.checkpoint.conversion import convert_to_hf, convert_to_sharded
from dovetail.cli.common import mesh_of
from dovetail.factory.engine import make_model, open_weights
from dovetail.factory.layouts import check_layout
from dovetail.launch.progress import Progress
from dovetail.nn.model import StagedModel
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained, locate, stored_head
from dovetail.weights.safe_paths import refuse_occupied, refuse_unwritable


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
        convert_to_hf(path, to, mesh, dtype=dtype)
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
    convert_to_sharded(source.path, to, mesh.layout, model_on, mesh, aliases=head.aliases, ignore=ignore, dtype=dtype)
