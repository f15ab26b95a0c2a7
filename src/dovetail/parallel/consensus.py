"""Errors of one rank, raised on all, so that none waits."""

import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import (
    CheckpointError,
    ConfigError,
    MachineError,
    UserError,
    disk_problem,
    listing,
    unequal,
)
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.mesh import Mesh

SHOWN = 12  # of a fingerprint


class CollectiveErrors:
    """The first error of this rank. path: for system errors without one."""

    def __init__(self, mesh: Mesh, path: Path | None = None) -> None:
        self.mesh = mesh
        self.path = path
        self.problem = ""
        self.of_machine = False

    @contextmanager
    def catch(self) -> Iterator[None]:
        try:
            yield
        except (UserError, MachineError, OSError) as error:
            if not self.problem:
                self._keep(error)

    def _keep(self, error: UserError | MachineError | OSError) -> None:
        self.problem = str(error)
        self.of_machine = isinstance(error, MachineError)
        if isinstance(error, OSError):
            unnamed = error.filename is None and self.path is not None
            place = f"{self.path}: " if unnamed else ""
            of_disk = disk_problem(error)
            self.of_machine = of_disk is not None
            self.problem = place + (of_disk or str(error))

    def raise_collectively(self) -> None:
        """Raises on every rank if any has a problem: MachineError or CheckpointError. Collective."""
        world = self.mesh["world"]
        ranks_of: dict[str, list[int]] = defaultdict(list)
        by_rank = of_all([self.problem, self.of_machine], self.mesh)
        for rank, (problem, _) in enumerate(by_rank):
            if problem:
                ranks_of[problem].append(rank)
        lines = []
        for problem, ranks in ranks_of.items():
            everywhere = len(ranks) == world.size
            names = ", ".join(map(str, ranks))
            lines.append(problem if everywhere else f"rank {names}: {problem}")
        if lines:
            message = listing(lines).removeprefix("  - ")
            if any(of_machine for _, of_machine in by_rank):
                raise MachineError(message)
            raise CheckpointError(message)


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
