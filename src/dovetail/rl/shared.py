"""Whether all ranks of a run write to one directory: those of several hosts need a file system that the hosts share."""

import contextlib
import json
import os
import socket
import time
import uuid
from pathlib import Path

from dovetail.comm import gather_text
from dovetail.errors import ConfigError
from dovetail.mesh import Mesh
from dovetail.weights.agree import agreed, of_first

SEEN_SECONDS = 15.0  # for a file to be seen on another host, whose file system may remember what was there
LOOK_SECONDS = 0.2
SHOWN = 8  # ranks in a message


def refuse_unshared(path: Path, mesh: Mesh) -> None:
    """Raise ConfigError on every rank where the run directory `path`, which may be absent, is not the same on all. Collective.

    The first rank makes a file in it, or in the nearest folder above it, for as long as the others look for that.
    """
    world, folders = mesh["world"], [path.absolute(), *path.absolute().parents]
    if world.size == 1:
        return
    above = next(i for i, folder in enumerate(folders) if folder.is_dir())
    mine = [f".tmp-shared-{uuid.uuid4().hex}", above, path.absolute().parts[len(folders) - above :]]
    name, above, inside = of_first(mine, mesh)
    folder = folders[min(above, len(folders) - 1)]
    try:
        with agreed(mesh):
            if world.rank == 0:
                (folder / name).touch()
        same = [*path.absolute().relative_to(folder).parts] == inside and _seen(folder / name)
        told = gather_text(json.dumps([socket.gethostname(), same]), world, mesh.device)
    finally:
        if world.rank == 0:
            (folder / name).unlink(missing_ok=True)
    everyone = [json.loads(text) for text in told]
    without = [f"{host} (rank {rank})" for rank, (host, same) in enumerate(everyone) if not same]
    if without:
        raise ConfigError(
            f"run_dir {path} is not the same directory on all hosts: {', '.join(without[:SHOWN])} cannot see what "
            f"{everyone[0][0]} (rank 0) writes there; give a directory that all hosts share, such as one on NFS"
        )


def _seen(file: Path) -> bool:
    """Whether the file appears in time. Listing its folder has NFS ask its server again."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError):
            os.listdir(file.parent)
    return True
