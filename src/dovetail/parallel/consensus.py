"""Errors of one rank, raised on all, so that none waits."""

import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import CheckpointError, ConfigError, UserError, listing, unequal
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.mesh import Mesh

SHOWN = 12  # of a fingerprint


class CollectiveErrors:
    """The first error of this rank. path: for system errors without one."""

    def __init__(self, mesh: Mesh, path: Path | None = None) -> None:
        self.mesh = mesh
        self.path = path
        self.problem = ""

    @contextmanager
    def catch(self) -> Iterator[None]:
        try:
            yield
        except (UserError, OSError) as error:
            problem = str(error)
            unnamed = isinstance(error, OSError) and error.filename is None
            if unnamed and self.path is not None:
                problem = f"{self.path}: {error}"
            self.problem = self.problem or problem

    def raise_collectively(self) -> None:
        """Raise CheckpointError on every rank if any has a problem. Collective."""
        world = self.mesh["world"]
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, problem in enumerate(of_all(self.problem, self.mesh)):
            if problem:
                ranks_of[problem].append(rank)
        lines = []
        for problem, ranks in ranks_of.items():
            everywhere = len(ranks) == world.size
            names = ", ".join(map(str, ranks))
            lines.append(problem if everywhere else f"rank {names}: {problem}")
        if lines:
            raise CheckpointError(listing(lines).removeprefix("  - "))


@contextmanager
def agreed(mesh: Mesh, path: Path | None = None) -> Iterator[None]:
    """Raise on all ranks if the block fails on one. No collectives within."""
    errors = CollectiveErrors(mesh, path)
    with errors.catch():
        yield
    errors.raise_collectively()


def of_all(value: Any, mesh: Mesh) -> list[Any]:
    """Return the values of all ranks, which pass through JSON. Collective."""
    return gather_objects(value, mesh["world"], mesh.device)


def of_first(value: Any, mesh: Mesh) -> Any:
    return of_all(value, mesh)[0]


def refuse_different(fingerprints: Mapping[str, str], mesh: Mesh) -> None:
    """Raise ConfigError where the content of a name differs between ranks. Collective."""
    by_rank = of_all([socket.gethostname(), fingerprints], mesh)
    hosts = [host for host, _ in by_rank]
    values = {}
    for name in fingerprints:
        values[name] = [prints[name][:SHOWN] for _, prints in by_rank]
    problems = unequal(values, hosts)
    if problems:
        problem = "hosts have files of different content; give all of them the same"
        raise ConfigError(f"{problem}:\n{listing(problems)}")
