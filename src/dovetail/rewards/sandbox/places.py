"""The folders that a program may read: the system's libraries and this Python's."""

import os
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/etc/alternatives",
    "/etc/ld.so.cache",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Place(NamedTuple):
    """A file or folder, opened so that a user who cannot walk to its path can use it."""

    path: str
    file: int

    @property
    def opened(self) -> str:
        return f"/proc/self/fd/{self.file}"


def readable_places() -> list[Place]:
    """Without those that lie in another one, or are links (which `links` names)."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    wanted = sorted({*SYSTEM, *python, *(os.path.realpath(path) for path in python)})
    kept: list[str] = []
    for path in wanted:
        inside = any(Path(path).is_relative_to(folder) for folder in kept)
        if path != "/" and not inside and os.path.exists(path) and not os.path.islink(path):
            kept.append(path)
    return [_opened(path) for path in kept]


def devices() -> list[Place]:
    return [_opened(path) for path in DEVICES if os.path.exists(path)]


def links() -> dict[str, str]:
    """The links among the system's folders, such as /lib -> usr/lib."""
    return {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}


def _opened(path: str) -> Place:
    return Place(path, os.open(path, os.O_PATH | os.O_CLOEXEC))


def import_from_opened(places: Seq[Place]) -> list[Place]:
    """Makes modules of unreachable places importable; returns these places.

    Python may lie in a home that only its owner enters, such as root's.
    """
    unreachable = [place for place in places if not os.access(place.path, os.R_OK)]
    for place in unreachable:
        moved = [_moved(path, place) for path in sys.path]
        sys.path.clear()
        sys.path.extend(moved)
        for module in list(sys.modules.values()):
            folders = vars(module).get("__path__")
            if isinstance(folders, list):
                folders[:] = [_moved(path, place) for path in folders]
    if unreachable:
        sys.path_importer_cache.clear()
    return unreachable


def _moved(path: str, place: Place) -> str:
    if not Path(path).is_relative_to(place.path):
        return path
    return place.opened + path.removeprefix(place.path)
