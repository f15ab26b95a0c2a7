"""A run whose directory is claimed, before its rows and engines exist."""

from contextlib import ExitStack
from dataclasses import dataclass

from dovetail.factory.rewards import Printed
from dovetail.factory.setup import Setup
from dovetail.run.directory import RunDirectory
from dovetail.run.resume import Resumed


@dataclass(frozen=True)
class Opened:
    """What the parts of a run are built from.

    weights: fingerprint of the first ones. at_close: what is closed with the run. printed: by
    rewards and metrics.
    """

    setup: Setup
    directory: RunDirectory
    weights: str
    at_close: ExitStack
    printed: Printed

    @property
    def resumed(self) -> Resumed | None:
        return self.directory.resumed
