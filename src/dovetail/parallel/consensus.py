"""Errors of one rank, raised on all, so that none waits."""

import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import (
    CallbackError,
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    MachineError,
    ModelError,
    NumericsError,
    OptionError,
    UserError,
    disk_problem,
    listing,
    unequal,
)
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.mesh import Mesh

SHOWN = 12  # of a fingerprint
KINDS: Mapping[str, type[UserError | MachineError]] = {  # that all ranks raise; else a checkpoint's
    kind.__name__: kind
    for kind in (
        CallbackError,
        CheckpointError,
        ConfigError,
        DataError,
        LayoutError,
        MachineError,
        ModelError,
        NumericsError,
        OptionError,
    )
}


class CollectiveErrors:
    """The first error of this rank. path: for system errors without one."""

    def __init__(self, mesh: Mesh, path: Path | None = None) -> None:
        self.mesh = mesh
        self.path = path
        self.problem = ""
        self.kind = ""

    @contextmanager
    def catch(self) -> Iterator[None]:
        try:
            yield
        except (UserError, MachineError, OSError) as error:
            if not self.problem:
                self._keep(error)

    def _keep(self, error: UserError | MachineError | OSError) -> None:
        self.problem = str(error)
        classes = [kind.__name__ for kind in type(error).__mro__]
        self.kind = next((name for name in classes if name in KINDS), CheckpointError.__name__)
        if isinstance(error, OSError):
            unnamed = error.filename is None and self.path is not None
            place = f"{self.path}: " if unnamed else ""
            of_disk = disk_problem(error)
            self.problem = place + (of_disk or str(error))
            if of_disk is not None:
                self.kind = MachineError.__name__

    def raise_collectively(self) -> None:
        """Raises on every rank if any has a problem, with the problems of all. Collective.

        The error is a MachineError if any rank has one, else of the first rank's kind.
        """
        world = self.mesh["world"]
        ranks_of: dict[str, list[int]] = defaultdict(list)
        kinds: list[str] = []
        by_rank = of_all([self.problem, self.kind], self.mesh)
        for rank, (problem, kind) in enumerate(by_rank):
            if problem:
                ranks_of[problem].append(rank)
                kinds.append(kind)
        lines = []
        for problem, ranks in ranks_of.items():
            everywhere = len(ranks) == world.size
            names = ", ".join(map(str, ranks))
            lines.append(problem if everywhere else f"rank {names}: {problem}")
        if lines:
            of_machine = MachineError.__name__ in kinds
            error = MachineError if of_machine else KINDS[kinds[0]]
            raise error(listing(lines).removeprefix("  - "))


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
