"""Atomic directories and files: written under a hidden name, synced, then renamed."""

import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import naming
from dovetail.parallel.consensus import CollectiveErrors, agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.weights.safe_paths import AuxiliaryFiles, refuse_occupied, refuse_unwritable
from dovetail.weights.safetensors import CHUNK


@dataclass(frozen=True)
class AtomicDirectory:
    """A directory that all ranks write. lead: this rank writes what exists once."""

    path: Path
    verdict: CollectiveErrors
    lead: bool


@contextmanager
def staged(target: Path, mesh: Mesh) -> Iterator[AtomicDirectory]:
    """Yield a hidden directory that becomes `target`, or is removed on an error. Collective."""
    lead = mesh["world"].rank == 0
    hidden = target.parent / f".tmp-{target.name}-{uuid.uuid4().hex[:8]}"
    with agreed(mesh):
        if lead:
            refuse_occupied(target)
            refuse_unwritable(target, "the directory")
            make_directory(target.parent)
            hidden.mkdir()
    path = Path(of_first(str(hidden), mesh))
    stage = AtomicDirectory(path, CollectiveErrors(mesh, target), lead)
    complete = False
    try:
        yield stage
        stage.verdict.raise_collectively()
        with agreed(mesh):
            if lead:
                for folder, _, _ in os.walk(stage.path):
                    sync_directory(Path(folder))
                os.rename(stage.path, target)
                sync_directory(target.parent)
        complete = True
    finally:
        if lead and not complete:
            shutil.rmtree(stage.path, ignore_errors=True)


def write_auxiliary(files: AuxiliaryFiles, directory: Path) -> dict[str, tuple[int, int]]:
    """Write the files, and return their sizes and CRC-32."""
    return {name: write_file(directory / name, content) for name, content in files.items()}


def write_file(path: Path, content: Path | bytes) -> tuple[int, int]:
    """Write a new file, synced, and return its size and CRC-32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    crc = 0
    blocks = [content] if isinstance(content, bytes) else file_blocks(content)
    with open(path, "xb") as out:
        for block in blocks:
            out.write(block)
            size += len(block)
            crc = zlib.crc32(block, crc)
        out.flush()
        os.fsync(out.fileno())
    return size, crc


def file_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            yield block


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file such that readers see the old one or the new one."""
    _replace(path, lambda fresh: write_file(fresh, content))


def replace_link(link: Path, target: str) -> None:
    _replace(link, lambda fresh: os.symlink(target, fresh))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    fresh = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with naming(path):
            make(fresh)
            os.replace(fresh, path)
    except OSError:
        with suppress(OSError):  # of a read-only disk
            fresh.unlink()
        raise
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
