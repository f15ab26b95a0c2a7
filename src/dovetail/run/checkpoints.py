"""The checkpoints of a run, and what a failed save does."""

import shutil
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

from dovetail.checkpoint.retention import Retention, oldest_of_last
from dovetail.checkpoint.writer import Saver
from dovetail.errors import CheckpointError, MachineError
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.run.callbacks import Callbacks
from dovetail.run.paths import CHECKPOINTS
from dovetail.run.state import RunState
from dovetail.weights.safe_paths import AuxiliaryFiles
from dovetail.weights.stream import Export

MAX_FAILED_SAVES = 3  # in a row
KEPT_AT_ONCE = 2  # checkpoints: old and new


def check_space(run_dir: Path, exports: Seq[Export], *, saves: bool) -> None:
    """MachineError if the disk cannot hold checkpoints of `exports`, or without `saves` a model."""
    needed = sum(spec.num_bytes for export in exports for spec in export.specs.values())
    wanted = "the final model takes"
    remedy = "or choose another run_dir"
    if saves:
        needed *= KEPT_AT_ONCE
        wanted = f"{KEPT_AT_ONCE} checkpoints take"
        remedy = "choose another run_dir, or set trainer.save_every=0"
    folders = (run_dir.absolute(), *run_dir.absolute().parents)
    folder = next(folder for folder in folders if folder.exists())
    total, _, free = shutil.disk_usage(folder)
    if free < needed and total:  # total 0: unknown
        room = f"{free / 1e9:.2g} GB are free, but {wanted} {needed / 1e9:.2g} GB"
        raise MachineError(f"run_dir {run_dir}: {room}; free some, {remedy}")


class RunCheckpoints:
    """Saves one checkpoint at a time, with `background` while training goes on.

    saved_step: of the newest whole checkpoint. event: writes to events.jsonl. after_save: takes the
    oldest step that is kept. Calls are collective.
    """

    def __init__(
        self,
        run_dir: Path,
        mesh: Mesh,
        retention: Retention,
        callbacks: Callbacks,
        event: Callable[..., None],
        say: Callable[[str], None],
        *,
        background: bool,
        saved_step: int | None,
    ) -> None:
        self.folder = run_dir / CHECKPOINTS
        self.mesh = mesh
        self.retention = retention
        self.callbacks = callbacks
        self.event = event
        self.say = say
        self.background = background
        self.saved_step = saved_step
        self.after_save: Callable[[int], None] | None = None
        self._saver = Saver(self.folder, mesh, retention, background=background)
        self._step = 0  # of the save under way
        self._failed = 0  # saves in a row

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part of the save under way."""
        return self._saver.done

    def save(self, state: RunState, exports: Seq[Export], auxiliary: AuxiliaryFiles) -> None:
        """Begins to write what `finish` waits for."""
        self._step = state.step
        self._saver.save(state.step, exports, auxiliary, dict(state))
        if not self.background:
            self.finish()

    def finish(self, *, is_last: bool = False) -> None:
        """Waits for the save under way. Raises its error if it `is_last`, or the third in a row."""
        try:
            if self._saver.finish():
                self._finished()
        except (CheckpointError, MachineError) as error:
            self._failed += 1
            self.event("save_failed", cause=str(error))
            if is_last or self._failed == MAX_FAILED_SAVES:
                kind = MachineError if isinstance(error, MachineError) else CheckpointError
                lost = "the run cannot be saved; what was saved before is whole"
                raise kind(f"{lost}\n{error}") from error
            self.say(f"A SAVE FAILED, the run goes on and earlier checkpoints are whole: {error}")

    def _finished(self) -> None:
        self._failed = 0
        self.saved_step = self._step
        if self.after_save is not None:
            with agreed(self.mesh):
                if self.mesh["world"].rank == 0:
                    self.after_save(oldest_of_last(self.folder, self.retention.last))
        self.callbacks("on_save", self.folder / f"step_{self._step:06}")

    def close(self) -> None:
        """Waits for the writing, without a verdict."""
        self._saver.join()
