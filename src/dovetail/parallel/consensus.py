"""One verdict for all ranks: what goes wrong on one is raised on every one, so nobody waits for one that has left."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import CheckpointError, ConfigError, UserError, listing, unequal
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.mesh import Mesh

SHOWN = 12  # characters of a fingerprint in a message


class CollectiveErrors:
    """Keeps this rank's errors until `settle`, where all ranks raise all of them together.

    After its first error a rank skips the rest of its own work, but it still takes part in every collective. `path` is
    what the work is on: the system names no file where a write fails.
    """

    def __init__(self, mesh: Mesh, path: Path | None = None) -> None:
        self.mesh, self.path = mesh, path
        self.problem = ""

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Remember a user's or the system's error of this block instead of raising it. No collectives inside."""
        try:
            yield
        except (UserError, OSError) as error:
            unnamed = self.path is not None and isinstance(error, OSError) and error.filename is None
            self.problem = self.problem or (f"{self.path}: {error}" if unnamed else str(error))

    def settle(self) -> None:
        """Raise the same `CheckpointError` on every rank if any rank has a problem. Collective."""
        world = self.mesh["world"]
        found: dict[str, list[int]] = {}
        for rank, problem in enumerate(gather_text(self.problem, world, self.mesh.device)):
            if problem:
                found.setdefault(problem, []).append(rank)
        if not found:
            return
        if len(found) == 1 and len(next(iter(found.values()))) == world.size:
            raise CheckpointError(next(iter(found)))
        raise CheckpointError(
            listing([f"rank {', '.join(map(str, ranks))}: {problem}" for problem, ranks in found.items()]).lstrip(" -")
        )


@contextmanager
def agreed(mesh: Mesh, path: Path | None = None) -> Iterator[None]:
    """Run a block without collectives on every rank; if it fails on one, all raise. Collective at the end.

    `path`: as `CollectiveErrors` takes it.
    """
    verdict = CollectiveErrors(mesh, path)
    with verdict.keep():
        yield
    verdict.settle()


def of_first(value: Any, mesh: Mesh) -> Any:
    """The first rank's `value`, which JSON can hold, on every rank. Collective."""
    return json.loads(gather_text(json.dumps(value), mesh["world"], mesh.device)[0])


def refuse_different(fingerprints: Mapping[str, str], mesh: Mesh) -> None:
    """Raise ConfigError on every rank where not all ranks have the same content behind a name. Collective."""
    told = gather_text(json.dumps([socket.gethostname(), fingerprints]), mesh["world"], mesh.device)
    everyone = [json.loads(text) for text in told]
    values = {name: [theirs[name][:SHOWN] for _, theirs in everyone] for name in fingerprints}
    if problems := unequal(values, [host for host, _ in everyone]):
        raise ConfigError(
            f"the hosts of this job have files of different content; give all of them the same:\n{listing(problems)}"
        )
