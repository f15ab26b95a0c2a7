"""`dovetail inspect`: what a sharded checkpoint holds, and whether it is whole."""

import argparse
from collections.abc import Mapping
from math import prod
from pathlib import Path

from dovetail.checkpoint.manifest import TRAINING, Manifest
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError
from dovetail.launch.process import put
from dovetail.weights.hf_reader import StoredTensor
from dovetail.weights.safe_paths import MANIFEST


def run(args: argparse.Namespace) -> None:
    path = Path(args.checkpoint)
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} has no {MANIFEST}; give a sharded checkpoint (dovetail convert --to sharded)")
    reader = ShardedReader(path)
    put(_summary(path, reader.manifest))
    if args.verify:
        reader.verify()
        put("verified: every piece matches its checksum\n")


def _summary(path: Path, manifest: Manifest) -> str:
    training = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(TRAINING)}
    model = {name: tensor for name, tensor in manifest.tensors.items() if name not in training}
    fields = {
        "checkpoint": str(path),
        "step": "none" if manifest.step is None else str(manifest.step),
        "layout": ",".join(f"{name}={degree}" for name, degree in manifest.layout.items()),
        "tensors": _sizes(model),
        "training": "none" if manifest.state is None else _sizes(training),
        "pieces": f"{len(manifest.pieces)} files, {sum(file.size for file in manifest.pieces.values()):,} bytes",
        "files": ", ".join(manifest.sides) or "none",
    }
    details: dict[str, object] = {}
    for role in sorted({name.removeprefix(TRAINING).rpartition("/")[0] for name in training}):
        details[role] = _sizes({n: tensor for n, tensor in training.items() if n.startswith(f"{TRAINING}{role}/")})
    details |= {name: x for name, x in (manifest.state or {}).items() if isinstance(x, str | int | float)}
    lines = [f"{name:<11} {value}\n" for name, value in fields.items()]
    return "".join([*lines, *(f"  {name:<20} {value}\n" for name, value in details.items())])


def _sizes(tensors: Mapping[str, StoredTensor]) -> str:
    values = sum(prod(tensor.shape) for tensor in tensors.values())
    size = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return f"{len(tensors)} ({values:,} values, {', '.join(dtypes)}, {size:,} bytes)"
