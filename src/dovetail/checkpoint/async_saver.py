"""Saves checkpoints, in the background if asked."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.checkpoint.retention import Retention, prune
from dovetail.checkpoint.writer import write_sharded
from dovetail.errors import Caught
from dovetail.memory import PinnedArena, wait_for
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.safe_paths import SideFiles
from dovetail.weights.shards import ParamShard
from dovetail.weights.stream import Export


class Saver:
    """One save at a time, over its own gloo group: training may go on."""

    def __init__(self, folder: Path, mesh: Mesh, retention: Retention, *, background: bool) -> None:
        self.folder, self.mesh, self.retention, self.background = folder, mesh, retention, background
        self._host = mesh.on_host()
        self._arena = PinnedArena(pinned=mesh.device.type != "cpu")
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._unfinished = False

    def save(self, step: int, exports: Sequence[Export], sides: SideFiles, state: Mapping[str, Any]) -> None:
        """`exports` as they are now. Collective."""
        assert not self._unfinished, "one save at a time: finish the one before"
        self._unfinished = True
        specs = [spec for export in exports for spec in export.specs.values()]
        pieces = {name: piece for export in exports for name, piece in export.local.items()}
        if self.background:
            self._arena.reset()
            pieces = {name: [self._copy(piece) for piece in held] for name, held in pieces.items()}
            wait_for(self.mesh.device)
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
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(self.mesh.timeout.total_seconds())

    def finish(self) -> bool:
        """Wait, raise its error; whether there was a save."""
        was_saving, self._unfinished = self._unfinished, False
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return was_saving

    def _copy(self, piece: ParamShard) -> ParamShard:
        copies = [self._arena.copy(piece.read())]
        return replace(piece, read=partial(copies.__getitem__, 0))  # no operator: it waits for the lock

    def _run(self, write: Callable[[], object]) -> None:
        with Caught(BaseException) as caught:
            write()
            with agreed(self._host):
                if self._host["world"].rank == 0:
                    prune(self.folder, self.retention)
        self._problem = caught.error
