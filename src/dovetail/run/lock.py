"""The lock of a run directory."""

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from pathlib import Path

from dovetail.errors import ConfigError
from dovetail.parallel.consensus import agreed, of_all, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.run.paths import LOCK

VISIBLE_SECONDS = 15.0  # for other hosts to see a new file
POLL_SECONDS = 0.2
MAX_SHOWN = 8  # ranks in a message


class RunLock:
    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._fd = -1

    def acquire(self) -> None:
        while self._fd < 0:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.read(fd, 4096).decode(errors="replace")
                os.close(fd)
                message = f"run_dir {self.path.parent} is in use by {_describe(owner)}; end that run first"
                raise ConfigError(message) from error
            if _is_at(fd, self.path):
                me = {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "started": time.strftime("%F %T %z"),
                }
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(me).encode(), 0)
                self._fd = fd
            else:  # removed by its owner
                os.close(fd)

    def release(self) -> None:
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _describe(owner: str) -> str:
    try:
        fields = json.loads(owner)
        return f"process {fields['pid']} on {fields['host']}, since {fields['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def refuse_unshared(path: Path, mesh: Mesh) -> None:
    """Collective. ConfigError unless all ranks see a file that rank 0 makes."""
    world = mesh["world"]
    folders = [path.absolute(), *path.absolute().parents]
    if world.size == 1:
        return
    above = next(i for i, folder in enumerate(folders) if folder.is_dir())
    name = f".tmp-shared-{uuid.uuid4().hex}"
    name, above, inside = of_first(
        [name, above, path.absolute().parts[len(folders) - above :]], mesh
    )
    folder = folders[min(above, len(folders) - 1)]
    try:
        with agreed(mesh):
            if world.rank == 0:
                (folder / name).touch()
        same = [*path.absolute().relative_to(folder).parts] == inside and _appears(folder / name)
        everyone = of_all([socket.gethostname(), same], mesh)
    finally:
        if world.rank == 0:
            (folder / name).unlink(missing_ok=True)
    if without := [
        f"{host} (rank {rank})" for rank, (host, same) in enumerate(everyone) if not same
    ]:
        unseen = f"{', '.join(without[:MAX_SHOWN])} cannot see what {everyone[0][0]} (rank 0) writes there"
        edit = "give a directory that all hosts share, such as one on NFS"
        raise ConfigError(
            f"run_dir {path} is not the same directory on all hosts: {unseen}; {edit}"
        )


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # makes NFS refresh it
    return file.exists()
