"""Writes sharded checkpoints: pieces, manifest, rename. A step's directory has a unique name, a link and `latest`."""

import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from dovetail.checkpoint.manifest import Manifest, StoredFile
from dovetail.checkpoint.retention import LATEST
from dovetail.parallel.consensus import agreed, of_all, of_first
from dovetail.parallel.layout import DEGREES, Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import AtomicDirectory, replace_file, replace_link, staged, write_file, write_sides
from dovetail.weights.hf_reader import StoredRegion, StoredTensor
from dovetail.weights.safe_paths import MANIFEST, SideFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec
from dovetail.weights.shards import ExportRules, ParamShard
from dovetail.weights.stream import export

Share = Mapping[str, Sequence[ParamShard]]


def save_sharded(
    model: nn.Module, path: Path, mesh: Mesh, *, sides: SideFiles, step: int | None = None, **rules: Unpack[ExportRules]
) -> Path:
    """Atomically. With `step`: `path/step_000050.<id>` and its link. Collective."""
    exported = export(model, mesh, **rules)
    shares = {mesh["world"].rank: exported.local}
    return write_sharded(path, mesh, list(exported.specs.values()), shares, mesh.layout, sides=sides, step=step)


def write_sharded(
    path: Path,
    mesh: Mesh,
    specs: Sequence[TensorSpec],
    shares: Mapping[int, Share],
    layout: Layout,
    *,
    sides: SideFiles,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """shares: rank of `layout` -> its pieces. Collective."""
    target, link = path, None
    if step is not None:
        link = path / f"step_{step:06}"
        target = path / f"{link.name}.{of_first(uuid.uuid4().hex[:8], mesh)}"
    with staged(target, mesh) as stage:
        written = [_write_share(stage, rank, share, layout) for rank, share in shares.items() if share]
        everyone = of_all(written, mesh)
        stage.verdict.raise_collectively()
        with stage.verdict.catch():
            if stage.lead:
                shares_written = [share for theirs in everyone for share in theirs]
                tensors, pieces = _contents(specs, shares_written)
                stored = {name: StoredFile(*entry) for name, entry in write_sides(sides, stage.path).items()}
                degrees = {name: getattr(layout, name) for name in DEGREES}
                write_file(stage.path / MANIFEST, Manifest(degrees, step, tensors, pieces, stored, state).dump())
    if link is not None:
        with agreed(mesh):
            if stage.lead:
                replace_link(link, target.name)
                replace_file(path / LATEST, f"{target.name}\n".encode())
    return target


def _write_share(stage: AtomicDirectory, rank: int, share: Share, layout: Layout) -> dict[str, Any]:
    """A second piece of a tensor has the key NAME#1."""
    file = f"pieces-{rank:05}-of-{layout.num_ranks:05}.safetensors"
    entry: dict[str, Any] = {"rank": rank, "file": file}
    with stage.verdict.catch():
        pieces = [(f"{name}#{i}" if i else name, name, p) for name, held in share.items() for i, p in enumerate(held)]
        specs = [TensorSpec(key, piece.dtype, piece.region.shape) for key, _, piece in pieces]
        writer = TensorFileWriter(stage.path / file, specs)
        for key, _, piece in pieces:
            writer.write(key, piece.read())
        writer.close()
        entry |= {"size": writer.size, "header_crc32": zlib.crc32(writer.header)}
        entry["regions"] = [(name, key, p.region.checkpoint_slice, writer.crc32[key]) for key, name, p in pieces]
    return entry


def _contents(
    specs: Sequence[TensorSpec], shares: list[dict[str, Any]]
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    shares = sorted(shares, key=lambda share: share["rank"])
    regions: dict[str, list[StoredRegion]] = {spec.name: [] for spec in specs}
    for share in shares:
        for name, key, slices, crc in share["regions"]:
            where = tuple((start, stop) for start, stop in slices)
            regions[name].append(StoredRegion(share["file"], key, where, crc))
    tensors = {spec.name: StoredTensor(spec.dtype, spec.shape, tuple(regions[spec.name])) for spec in specs}
    return tensors, {share["file"]: StoredFile(share["size"], share["header_crc32"]) for share in shares}
