"""Ends a run whose numbers are past mending: updates that are skipped in a row, copies of weights that differ."""

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from dovetail.engine.base import Engine
from dovetail.errors import NumericsError


class Guard:
    """Looks at every step of one run. Each rank comes to the same conclusion."""

    def __init__(self, max_skipped: int, check_replicas_every: int) -> None:
        self.max_skipped, self.check_replicas_every = max_skipped, check_replicas_every
        self.skipped = 0

    def look(self, row: Mapping[str, Any], trained: Seq[Engine]) -> None:
        """Raise NumericsError after too many skipped steps in a row, MachineError where copies differ. Collective."""
        step = row["step"]
        self.skipped = self.skipped + 1 if row.get("skipped") else 0
        if self.skipped == self.max_skipped:
            raise NumericsError(
                f"step {step}: the updates of {self.skipped} steps in a row were skipped: {row['fault']}; the weights "
                "are those of before; what the ranks computed on lies in run_dir under faults/; mend the data or the "
                "reward, lower optim.lr, or go on from an earlier checkpoint; trainer.max_skipped_steps allows more"
            )
        if self.check_replicas_every and step % self.check_replicas_every == 0:
            for engine in trained:
                engine.check_replicas()
