"""Saves a run's checkpoints, in the background where it is told to: training goes on while a snapshot is written.

`save` returns when the snapshot is taken. One save is under way at a time; what goes wrong with it is told at the next
`settle`, on every rank alike. Ranks agree over a gloo group of their own: a rank writes its pieces while the others wait.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from dovetail.checkpoint.retention import Retention, prune
from dovetail.checkpoint.writer import write_sharded
from dovetail.memory import PinnedArena, wait_for
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.safe_paths import SideFiles
from dovetail.weights.shards import ParamShard
from dovetail.weights.stream import Export


class Saver:
    """Writes the checkpoints of one run into `folder`. Made and used by all ranks alike."""

    def __init__(self, folder: Path, mesh: Mesh, retention: Retention, *, background: bool) -> None:
        self.folder, self.mesh, self.retention, self.background = folder, mesh, retention, background
        self._host = mesh.on_host()
        self._arena = PinnedArena(pinned=mesh.device.type != "cpu")
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._asked = False

    def save(self, step: int, exports: Sequence[Export], sides: SideFiles, state: Mapping[str, Any]) -> None:
        """Save what `exports` hand out, as it is now. Collective; `settle` comes before the next one."""
        assert not self._asked, "one save at a time: settle the one before"
        self._asked = True
        specs = [spec for export in exports for spec in export.specs.values()]
        mine = {name: piece for export in exports for name, piece in export.mine.items()}
        if self.background:
            mine = self._snapshot(mine)
        write = partial(
            write_sharded, self.folder, self._host, specs, {self._host["world"].rank: mine}, self.mesh.layout
        )
        work = partial(self._run, partial(write, sides=sides, step=step, state=state))
        if not self.background:
            work()
            return
        self._thread = threading.Thread(target=work, name=f"save of step {step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `settle` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Let the save that is under way come to its end, whatever that is: for a run that ends by an error of its own."""
        if self._thread is not None:
            self._thread.join(self.mesh.timeout.total_seconds())

    def settle(self) -> bool:
        """Wait for the save that is under way, and raise what went wrong with it: the same on every rank.

        Whether there was one.
        """
        asked, self._asked = self._asked, False
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return asked

    def _snapshot(self, pieces: Mapping[str, ParamShard]) -> dict[str, ParamShard]:
        """The same pieces with their bytes copied to the host."""
        self._arena.reset()
        copies = {name: self._arena.copy(piece.read()) for name, piece in pieces.items()}
        wait_for(self.mesh.device)
        return {name: replace(piece, read=partial(_given, copies[name])) for name, piece in pieces.items()}

    def _run(self, write: Callable[[], object]) -> None:
        """Write and clear away. Whatever goes wrong is for `settle` to raise: in a thread nobody would see it."""
        with ExitStack() as stack:
            stack.push(self._keep_problem)
            write()
            with agreed(self._host):
                if self._host["world"].rank == 0:
                    prune(self.folder, self.retention)

    def _keep_problem(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        self._problem = error
        return True


def _given(tensor: Tensor) -> Tensor:
    return tensor
