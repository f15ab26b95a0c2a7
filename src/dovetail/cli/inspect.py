"""`dovetail inspect`: what a sharded checkpoint holds, and whether it is whole."""

import argparse
import sys
from math import prod
from pathlib import Path

from dovetail.checkpoint.manifest import Manifest
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError
from dovetail.weights.directory import MANIFEST


def run(args: argparse.Namespace) -> None:
    """Print a summary; with --verify compare every checksum."""
    path = Path(args.checkpoint)
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} has no {MANIFEST}; give a sharded checkpoint (dovetail convert --to sharded)")
    reader = ShardedReader(path)
    sys.stdout.write(_summary(path, reader.manifest))
    if args.verify:
        reader.verify()
        sys.stdout.write("verified: every piece matches its checksum\n")


def _summary(path: Path, manifest: Manifest) -> str:
    values = sum(prod(tensor.shape) for tensor in manifest.tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in manifest.tensors.values()})
    lines = {
        "checkpoint": str(path),
        "step": "none" if manifest.step is None else str(manifest.step),
        "layout": ",".join(f"{name}={degree}" for name, degree in manifest.layout.items()),
        "tensors": f"{len(manifest.tensors)} ({values:,} values, {', '.join(dtypes)})",
        "pieces": f"{len(manifest.pieces)} files, {sum(file.size for file in manifest.pieces.values()):,} bytes",
        "files": ", ".join(manifest.sides) or "none",
    }
    return "".join(f"{name:<11} {value}\n" for name, value in lines.items())
