"""`dovetail merge`: a model with an adapter added to it."""

import argparse
from pathlib import Path

import torch

from dovetail.checkpoint.conversion import convert_to_hf
from dovetail.cli.common import mesh_of
from dovetail.cli.convert import progressing
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import agreed
from dovetail.weights.hf_directory import locate
from dovetail.weights.safe_paths import refuse_occupied, refuse_unwritable


def run(args: argparse.Namespace, progress: Progress) -> None:
    mesh = mesh_of(args)
    progress.phase("run")
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    target = Path(args.destination)
    with agreed(mesh):
        refuse_occupied(target)
        refuse_unwritable(target, "the directory")
        path = locate(args.base)
    with progressing(args, mesh) as sources:
        adapter = Path(args.adapter)
        convert_to_hf(path, target, mesh, dtype=dtype, adapter=adapter, watch=sources.append)
