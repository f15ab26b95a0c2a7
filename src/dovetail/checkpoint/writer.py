"""Writing of sharded checkpoints, also in the background: pieces, manifest, rename.

A step has a unique name, a link and `latest`.
"""

import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
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
    write_auxiliary,
    write_file,
)
from dovetail.weights.hf_reader import StoredRegion, StoredTensor
from dovetail.weights.safe_paths import MANIFEST, AuxiliaryFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec
from dovetail.weights.shards import ExportRules, ParamShard
from dovetail.weights.stream import Export, export

Share = Mapping[str, Sequence[ParamShard]]


def save_sharded(
    model: nn.Module,
    path: Path,
    mesh: Mesh,
    *,
    auxiliary: AuxiliaryFiles,
    step: int | None = None,
    **rules: Unpack[ExportRules],
) -> Path:
    """Write a model, atomically. With `step`: `path/step_000050.<id>` and its link. Collective."""
    exported = export(model, mesh, **rules)
    specs = list(exported.specs.values())
    shares = {mesh["world"].rank: exported.local}
    return write_sharded(path, mesh, specs, shares, mesh.layout, auxiliary=auxiliary, step=step)


def write_sharded(
    path: Path,
    mesh: Mesh,
    specs: Sequence[TensorSpec],
    shares: Mapping[int, Share],
    layout: Layout,
    *,
    auxiliary: AuxiliaryFiles,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint, atomically. shares: rank of `layout` -> its pieces. Collective."""
    target = path
    link = None
    if step is not None:
        link = path / f"step_{step:06}"
        unique = of_first(uuid.uuid4().hex[:8], mesh)
        target = path / f"{link.name}.{unique}"
    with staged(target, mesh) as stage:
        written = []
        for rank, share in shares.items():
            if share:
                written.append(_write_share(stage, rank, share, layout))
        by_rank = of_all(written, mesh)
        stage.verdict.raise_collectively()
        with stage.verdict.catch():
            if stage.lead:
                tensors, pieces = _contents(specs, chain(*by_rank))
                sizes = write_auxiliary(auxiliary, stage.path)
                stored = {name: StoredFile(*entry) for name, entry in sizes.items()}
                degrees = {name: getattr(layout, name) for name in DEGREES}
                manifest = Manifest(degrees, step, tensors, pieces, stored, state)
                write_file(stage.path / MANIFEST, manifest.dump())
    if link is not None:
        with agreed(mesh):
            if stage.lead:
                replace_link(link, target.name)
                replace_file(path / LATEST, f"{target.name}\n".encode())
    return target


def _write_share(stage: AtomicDirectory, rank: int, share: Share, layout: Layout) -> dict[str, Any]:
    """Write a file, and describe it for the manifest.

    The second piece of a tensor has the key NAME#1.
    """
    file = f"pieces-{rank:05}-of-{layout.num_ranks:05}.safetensors"
    entry: dict[str, Any] = {"rank": rank, "file": file}
    with stage.verdict.catch():
        pieces = []
        for name, held in share.items():
            for number, piece in enumerate(held):
                key = f"{name}#{number}" if number else name
                pieces.append((name, key, piece))
        specs = [TensorSpec(key, piece.dtype, piece.region.shape) for _, key, piece in pieces]
        writer = TensorFileWriter(stage.path / file, specs)
        regions = []
        for name, key, piece in pieces:
            writer.write(key, piece.read())
            regions.append((name, key, piece.region.checkpoint_slice, writer.crc32[key]))
        writer.close()
        entry["size"] = writer.size
        entry["header_crc32"] = zlib.crc32(writer.header)
        entry["regions"] = regions
    return entry


def _contents(
    specs: Sequence[TensorSpec], shares: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Return tensors and pieces of the manifest."""
    regions: dict[str, list[StoredRegion]] = {spec.name: [] for spec in specs}
    files = {}
    for share in sorted(shares, key=lambda share: share["rank"]):
        file = share["file"]
        files[file] = StoredFile(share["size"], share["header_crc32"])
        for name, key, slices, crc in share["regions"]:
            region = tuple((start, stop) for start, stop in slices)
            regions[name].append(StoredRegion(file, key, region, crc))
    tensors = {}
    for spec in specs:
        tensors[spec.name] = StoredTensor(spec.dtype, spec.shape, tuple(regions[spec.name]))
    return tensors, files


def merged(exports: Sequence[Export]) -> tuple[list[TensorSpec], dict[str, list[ParamShard]]]:
    """Return the tensors of all exports, and the pieces of this rank."""
    specs: list[TensorSpec] = []
    share: dict[str, list[ParamShard]] = {}
    for each in exports:
        specs += each.specs.values()
        share |= each.local
    return specs, share


class Saver:
    """Saves, one at a time, over a gloo group of their own: training may go on."""

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
        self,
        step: int,
        exports: Sequence[Export],
        auxiliary: AuxiliaryFiles,
        state: Mapping[str, Any],
    ) -> None:
        """Save `exports` as they are now. Collective."""
        assert not self._unfinished, "one save at a time: finish the one before"
        self._unfinished = True
        specs, share = merged(exports)
        if self.background:
            self._arena.reset()
            share = {name: [self._copy(piece) for piece in held] for name, held in share.items()}
            wait_for(self.mesh.device)
        shares = {self._host["world"].rank: share}
        write = partial(write_sharded, self.folder, self._host, specs, shares, self.mesh.layout)
        work = partial(write, auxiliary=auxiliary, step=step, state=state)
        if not self.background:
            self._run(work)
            return
        name = f"save of step {step}"
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(self.mesh.timeout.total_seconds())

    def finish(self) -> bool:
        """Wait for the save and raise its error. Return whether there was one."""
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
        copy = self._arena.copy(piece.read())
        return replace(piece, read=lambda: copy)  # no operator: it waits for the lock

    def _run(self, write: Callable[[], object]) -> None:
        with Caught(BaseException) as caught:
            write()
            with agreed(self._host):
                if self._host["world"].rank == 0:
                    prune(self.folder, self.retention)
        self._problem = caught.error
