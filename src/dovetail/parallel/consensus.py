"""Errors of one rank raised on all, so that none waits."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import CheckpointError, ConfigError, UserError, listing, unequal
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.mesh import Mesh

SHOWN = 12  # of a fingerprint


class CollectiveErrors:
    """Keeps the first. path: for system errors without one."""

    def __init__(self, mesh: Mesh, path: Path | None = None) -> None:
        self.mesh = mesh
        self.path = path
        self.problem = ""

    @contextmanager
    def catch(self) -> Iterator[None]:
        try:
            yield
        except (UserError, OSError) as error:
            unnamed = (
                self.path is not None and isinstance(error, OSError) and error.filename is None
            )
            self.problem = self.problem or (f"{self.path}: {error}" if unnamed else str(error))

    def raise_collectively(self) -> None:
        """CheckpointError on every rank if any has a problem. Collective."""
        world = self.mesh["world"]
        ranks_of: dict[str, list[int]] = {}
        for rank, problem in enumerate(of_all(self.problem, self.mesh)):
            if problem:
                ranks_of.setdefault(problem, []).append(rank)
        lines = [
            problem if len(ranks) == world.size else f"rank {', '.join(map(str, ranks))}: {problem}"
            for problem, ranks in ranks_of.items()
        ]
        if lines:
            raise CheckpointError(listing(lines).removeprefix("  - "))


@contextmanager
def agreed(mesh: Mesh, path: Path | None = None) -> Iterator[None]:
    """If the block fails on one rank, all raise. No collectives within."""
    errors = CollectiveErrors(mesh, path)
    with errors.catch():
        yield
    errors.raise_collectively()


def of_all(value: Any, mesh: Mesh) -> list[Any]:
    """Values pass through JSON. Collective."""
    return gather_objects(value, mesh["world"], mesh.device)


def of_first(value: Any, mesh: Mesh) -> Any:
    return of_all(value, mesh)[0]


def refuse_different(fingerprints: Mapping[str, str], mesh: Mesh) -> None:
    """ConfigError where a name's content differs between ranks. Collective."""
    by_rank = of_all([socket.gethostname(), fingerprints], mesh)
    values = {name: [prints[name][:SHOWN] for _, prints in by_rank] for name in fingerprints}
    if problems := unequal(values, [host for host, _ in by_rank]):
        raise ConfigError(
            f"hosts have files of different content; give all of them the same:\n{listing(problems)}"
        )
