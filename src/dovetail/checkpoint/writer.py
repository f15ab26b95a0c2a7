"""Writes sharded checkpoints: each rank its own pieces with checksums, then one manifest, then a rename.

A step's directory gets a name that no other attempt has, so nothing is ever overwritten: readers see the old checkpoint
or the new one. The plain name `step_000050` is a link to the newest attempt, and `latest` names it.
"""

import json
import os
import uuid
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dovetail.checkpoint.manifest import Manifest, StoredFile, StoredRegion, StoredTensor
from dovetail.checkpoint.retention import LATEST
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.consensus import agreed
from dovetail.parallel.layout import DEGREES, Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import AtomicDirectory, replace_file, staged, sync_directory, write_file, write_sides
from dovetail.weights.safe_paths import MANIFEST, SideFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec
from dovetail.weights.shards import Dtypes, ParamShard, own_dtype, tensor_of
from dovetail.weights.stream import export


def save_sharded(
    model: nn.Module,
    path: Path | str,
    mesh: Mesh,
    *,
    sides: SideFiles,
    step: int | None = None,
    dtype_of: Dtypes = own_dtype,
    listed: Collection[str] | None = None,
) -> Path:
    """Write `model` as a sharded checkpoint, complete or not at all; where it lies. Collective.

    With `step`, `path` is the folder of a run's checkpoints, and the result is `path/step_000050.<id>` with the link
    `path/step_000050`. `dtype_of` and `listed` are those of `stream.export`.
    """
    found = export(model, mesh, dtype_of=dtype_of, listed=listed)
    shares = {mesh["world"].rank: found.mine}
    return write_sharded(Path(path), mesh, list(found.specs.values()), shares, mesh.layout, sides=sides, step=step)


def write_sharded(
    path: Path,
    mesh: Mesh,
    specs: Sequence[TensorSpec],
    shares: Mapping[int, Mapping[str, ParamShard]],
    layout: Layout,
    *,
    sides: SideFiles,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write the pieces of `shares` (rank of `layout` -> its pieces); all processes' shares make the tensors."""
    target, link = path, None
    if step is not None:
        link = path / f"step_{step:06}"
        attempt = gather_text(uuid.uuid4().hex[:8], mesh["world"], mesh.device)[0]
        target = path / f"{link.name}.{attempt}"
    with staged(target, mesh) as stage:
        written = [_write_share(stage, rank, share, layout) for rank, share in shares.items() if share]
        found = gather_text(json.dumps(written), mesh["world"], mesh.device)
        stage.verdict.raise_collectively()
        with stage.verdict.catch():
            if stage.lead:
                stored = {name: StoredFile(*facts) for name, facts in write_sides(sides, stage.path).items()}
                manifest = _manifest(specs, [each for text in found for each in json.loads(text)], layout, step, stored)
                write_file(stage.path / MANIFEST, replace(manifest, state=state).dump())
    if link is not None:
        with agreed(mesh):
            if stage.lead:
                _point(link, target)
                replace_file(path / LATEST, f"{target.name}\n".encode())
    return target


def _write_share(
    stage: AtomicDirectory, rank: int, share: Mapping[str, ParamShard], layout: Layout
) -> dict[str, object]:
    """One rank's pieces as one file; what the manifest has to say of it."""
    file = f"pieces-{rank:05}-of-{layout.num_ranks:05}.safetensors"
    facts: dict[str, object] = {"rank": rank, "file": file}
    with stage.verdict.catch():
        specs = [TensorSpec(name, piece.dtype, piece.region.shape) for name, piece in share.items()]
        writer = TensorFileWriter(stage.path / file, specs)
        for name, piece in share.items():
            writer.write(name, piece.read())
        writer.close()
        facts |= {"size": writer.size, "header_crc32": zlib.crc32(writer.header)}
        facts["regions"] = {name: (piece.region.checkpoint_slice, writer.crc32[name]) for name, piece in share.items()}
    return facts


def _manifest(
    specs: Sequence[TensorSpec],
    written: list[dict[str, object]],
    layout: Layout,
    step: int | None,
    sides: Mapping[str, StoredFile],
) -> Manifest:
    regions: dict[str, list[StoredRegion]] = {spec.name: [] for spec in specs}
    written = sorted(written, key=lambda facts: facts["rank"])  # type: ignore[arg-type,return-value]  # a whole number
    for facts in written:
        for key, (slices, crc) in facts["regions"].items():  # type: ignore[attr-defined]  # a dict, from `_write_share`
            where = tuple((start, stop) for start, stop in slices)
            regions[tensor_of(key, regions)].append(StoredRegion(str(facts["file"]), key, where, crc))
    return Manifest(
        layout={name: getattr(layout, name) for name in DEGREES},
        step=step,
        tensors={spec.name: StoredTensor(spec.dtype, spec.shape, tuple(regions[spec.name])) for spec in specs},
        pieces={str(f["file"]): StoredFile(f["size"], f["header_crc32"]) for f in written},  # type: ignore[arg-type]
        sides=sides,
    )


def _point(link: Path, target: Path) -> None:
    """Make `link` name `target` in one step."""
    fresh = link.with_name(f".tmp-{target.name}-link")
    os.symlink(target.name, fresh)
    try:
        os.replace(fresh, link)
    except OSError:
        fresh.unlink()
        raise
    sync_directory(link.parent)
