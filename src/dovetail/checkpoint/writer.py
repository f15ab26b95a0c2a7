"""Writes sharded checkpoints, also in the background: pieces, manifest, rename. A step has a unique name, a link and `latest`."""

import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from dovetail.checkpoint.manifest import Manifest, StoredFile
from dovetail.checkpoint.retention import LATEST, Retention, prune
from dovetail.errors import Caught
from dovetail.memory import PinnedArena, wait_for
from dovetail.parallel.consensus import agreed, of_all, of_first
from dovetail.parallel.layout import DEGREES, Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import (
    AtomicDirectory,
    replace_file,
    replace_link,
    staged,
    write_file,
    write_sides,
)
from dovetail.weights.hf_reader import StoredRegion, StoredTensor
from dovetail.weights.safe_paths import MANIFEST, SideFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec
from dovetail.weights.shards import ExportRules, ParamShard
from dovetail.weights.stream import Export, export

Share = Mapping[str, Sequence[ParamShard]]


def save_sharded(
    model: nn.Module,
    path: Path,
    mesh: Mesh,
    *,
    sides: SideFiles,
    step: int | None = None,
    **rules: Unpack[ExportRules],
) -> Path:
    """Atomically. With `step`: `path/step_000050.<id>` and its link. Collective."""
    exported = export(model, mesh, **rules)
    shares = {mesh["world"].rank: exported.local}
    return write_sharded(
        path, mesh, list(exported.specs.values()), shares, mesh.layout, sides=sides, step=step
    )


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
    target = path
    link = None
    if step is not None:
        link = path / f"step_{step:06}"
        target = path / f"{link.name}.{of_first(uuid.uuid4().hex[:8], mesh)}"
    with staged(target, mesh) as stage:
        written = [
            _write_share(stage, rank, share, layout) for rank, share in shares.items() if share
        ]
        everyone = of_all(written, mesh)
        stage.verdict.raise_collectively()
        with stage.verdict.catch():
            if stage.lead:
                shares_written = [share for theirs in everyone for share in theirs]
                tensors, pieces = _contents(specs, shares_written)
                stored = {
                    name: StoredFile(*entry)
                    for name, entry in write_sides(sides, stage.path).items()
                }
                degrees = {name: getattr(layout, name) for name in DEGREES}
                write_file(
                    stage.path / MANIFEST,
                    Manifest(degrees, step, tensors, pieces, stored, state).dump(),
                )
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
        pieces = [
            (f"{name}#{i}" if i else name, name, p)
            for name, held in share.items()
            for i, p in enumerate(held)
        ]
        specs = [TensorSpec(key, piece.dtype, piece.region.shape) for key, _, piece in pieces]
        writer = TensorFileWriter(stage.path / file, specs)
        for key, _, piece in pieces:
            writer.write(key, piece.read())
        writer.close()
        entry |= {"size": writer.size, "header_crc32": zlib.crc32(writer.header)}
        entry["regions"] = [
            (name, key, p.region.checkpoint_slice, writer.crc32[key]) for key, name, p in pieces
        ]
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
    tensors = {
        spec.name: StoredTensor(spec.dtype, spec.shape, tuple(regions[spec.name])) for spec in specs
    }
    return tensors, {
        share["file"]: StoredFile(share["size"], share["header_crc32"]) for share in shares
    }


class Saver:
    """One save at a time, over its own gloo group: training may go on."""

    def __init__(self, folder: Path, mesh: Mesh, retention: Retention, *, background: bool) -> None:
        self.folder = folder
        self.mesh = mesh
        self.retention = retention
        self.background = background
        self._host = mesh.on_host()
        self._arena = PinnedArena(pinned=mesh.device.type != "cpu")
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._unfinished = False

    def save(
        self, step: int, exports: Sequence[Export], sides: SideFiles, state: Mapping[str, Any]
    ) -> None:
        """`exports` as they are now. Collective."""
        assert not self._unfinished, "one save at a time: finish the one before"
        self._unfinished = True
        specs = [spec for export in exports for spec in export.specs.values()]
        pieces = {name: piece for export in exports for name, piece in export.local.items()}
        if self.background:
            self._arena.reset()
            pieces = {name: [self._copy(piece) for piece in held] for name, held in pieces.items()}
            wait_for(self.mesh.device)
        shares = {self._host["world"].rank: pieces}
        write = partial(write_sharded, self.folder, self._host, specs, shares, self.mesh.layout)
        work = partial(self._run, partial(write, sides=sides, step=step, state=state))
        if not self.background:
            work()
            return
        self._thread = threading.Thread(target=work, name=f"save of step {step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(self.mesh.timeout.total_seconds())

    def finish(self) -> bool:
        """Wait, raise its error; whether there was a save."""
        was_saving = self._unfinished
        self._unfinished = False
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem = self._problem
        self._problem = None
        if problem is not None:
            raise problem
        return was_saving

    def _copy(self, piece: ParamShard) -> ParamShard:
        copies = [self._arena.copy(piece.read())]
        return replace(
            piece, read=partial(copies.__getitem__, 0)
        )  # no operator: it waits for the lock

    def _run(self, write: Callable[[], object]) -> None:
        with Caught(BaseException) as caught:
            write()
            with agreed(self._host):
                if self._host["world"].rank == 0:
                    prune(self.folder, self.retention)
        self._problem = caught.error
