"""What a save says is there stays there when the power fails: all of it is on the disk before it gets its name, and the name
before anything older is removed.

Calls of the system are watched in this process: what was put on the disk by fsync, and how it was then.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import replace_file
from dovetail.weights.safetensors import TensorSpec
from dovetail.weights.save import write_hf
from tests.helpers.saves import SIDES, Run

Inode = tuple[int, int]


def inode(found: os.stat_result) -> Inode:
    return found.st_dev, found.st_ino


class Disk:
    """Looks at every change of the disk, and remembers what would be lost if the power failed now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # an empty one
        self.original = {
            name: vars(os)[name]
            for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
        }
        self.synced: dict[
            Inode, tuple[int, int]
        ] = {}  # when it was changed last, and its size, as it was put on the disk
        self.unnamed: dict[Inode, Path] = {}  # directories of which a new entry is not on the disk
        self.published: list[str] = []

    def fsync(self, fd: int) -> None:
        self.original["fsync"](fd)
        found = os.fstat(fd)
        self.synced[inode(found)] = (found.st_mtime_ns, found.st_size)
        self.unnamed.pop(inode(found), None)

    def mkdir(self, path: Any, *given: Any, **more: Any) -> None:
        self.original["mkdir"](path, *given, **more)
        self._enter(Path(path))

    def move(self, how: str) -> Callable[[Any, Any], None]:
        """rename or replace. A name with a dot in front is nobody's but the save's own."""

        def moved(source: Any, target: Any) -> None:
            source, target = Path(source), Path(target)
            if target.name.startswith("."):
                self._remove(source)
            else:
                assert [path for path in self._inside(source) if not self._is_safe(path)] == [], (
                    f"before {target.name}"
                )
            self.original[how](source, target)
            if not target.name.startswith("."):
                self._enter(target)
                self.published.append(target.name)

        return moved

    def removal(self, how: str) -> Callable[..., None]:
        def removed(path: Any, *given: Any, **more: Any) -> None:
            self._remove(path)
            self.original[how](path, *given, **more)

        return removed

    def _enter(self, path: Path) -> None:
        self.unnamed[inode(path.parent.stat())] = path.parent

    def _remove(self, path: Any) -> None:
        assert not self.unnamed, f"{path} is removed while a name is not on the disk"

    @staticmethod
    def _inside(path: Path) -> Iterator[Path]:
        yield path
        yield from path.rglob("*") if path.is_dir() and not path.is_symlink() else ()

    def _is_safe(self, path: Path) -> bool:
        found = path.lstat()
        return path.is_symlink() or self.synced.get(inode(found)) == (
            found.st_mtime_ns,
            found.st_size,
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    watched: dict[str, Any] = {"fsync": disk.fsync, "mkdir": disk.mkdir}
    watched |= {how: disk.move(how) for how in ("rename", "replace")}
    watched |= {how: disk.removal(how) for how in ("unlink", "rmdir")}
    with mock.patch.multiple(os, **watched):
        yield disk


def test_a_checkpoint_is_on_the_disk_before_its_name_and_that_before_an_older_one_goes(
    disk: Disk,
) -> None:
    run = Run(disk.folder / "checkpoints", keep=1)
    for step in (1, 2, 3):
        run.save(step, step)
        assert not disk.unnamed
    assert disk.published[0].startswith("step_000001.")
    assert disk.published.count("latest") == 3
    assert (
        len(
            [path for path in (disk.folder / "checkpoints").glob("step_*") if not path.is_symlink()]
        )
        == 1
    )


def test_a_model_is_on_the_disk_before_its_name(disk: Disk) -> None:
    specs = [TensorSpec(name, torch.float32, (4, 4)) for name in ("a", "b")]
    made = [(spec.name, torch.zeros(4, 4)) for spec in specs]
    write_hf(
        disk.folder / "run" / "hf",
        Mesh.solo(),
        specs,
        lambda *_: iter(made),
        auxiliary=SIDES,
        shard_bytes=64,
    )
    assert disk.published == ["hf"] and not disk.unnamed
    assert len(list((disk.folder / "run" / "hf").glob("*.safetensors"))) == 2


def test_a_file_that_is_replaced_is_on_the_disk_before_its_name(disk: Disk) -> None:
    replace_file(disk.folder / "config.yaml", b"1")
    replace_file(disk.folder / "config.yaml", b"2")
    assert disk.published == ["config.yaml"] * 2 and not disk.unnamed
