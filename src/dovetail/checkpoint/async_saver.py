"""Saves checkpoints, on request in the background while training continues."""

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
    """Writes the checkpoints of one run, one at a time. Its own gloo group: ranks agree while others train."""

    def __init__(self, folder: Path, mesh: Mesh, retention: Retention, *, background: bool) -> None:
        self.folder, self.mesh, self.retention, self.background = folder, mesh, retention, background
        self._host = mesh.on_host()
        self._arena = PinnedArena(pinned=mesh.device.type != "cpu")
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._unfinished = False

    def save(self, step: int, exports: Sequence[Export], sides: SideFiles, state: Mapping[str, Any]) -> None:
        """Save `exports` as they are now; `finish` comes before the next. Collective."""
        assert not self._unfinished, "one save at a time: finish the one before"
        self._unfinished = True
        specs = [spec for export in exports for spec in export.specs.values()]
        pieces = {name: piece for export in exports for name, piece in export.local.items()}
        if self.background:
            pieces = self._snapshot(pieces)
        shares = {self._host["world"].rank: pieces}
        write = partial(write_sharded, self.folder, self._host, specs, shares, self.mesh.layout)
        work = partial(self._run, partial(write, sides=sides, step=step, state=state))
        if not self.background:
            work()
            return
        self._thread = threading.Thread(target=work, name=f"save of step {step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `finish` would not block."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the save, whatever its result."""
        if self._thread is not None:
            self._thread.join(self.mesh.timeout.total_seconds())

    def finish(self) -> bool:
        """Wait for the save and raise its error on every rank; whether there was one."""
        was_saving, self._unfinished = self._unfinished, False
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return was_saving

    def _snapshot(self, pieces: Mapping[str, ParamShard]) -> dict[str, ParamShard]:
        self._arena.reset()
        copies = {name: self._arena.copy(piece.read()) for name, piece in pieces.items()}
        wait_for(self.mesh.device)
        return {name: replace(piece, read=partial(_identity, copies[name])) for name, piece in pieces.items()}

    def _run(self, write: Callable[[], object]) -> None:
        """Write and prune; `finish` raises the errors of the thread."""
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


def _identity(tensor: Tensor) -> Tensor:
    return tensor
