"""The directory of a run: what is written where, by whom, what a resumed run finds there, and what the terminal shows.

run_dir/config.yaml, metrics.jsonl, events.jsonl, rollouts/step_000001.jsonl, checkpoints/step_000050, hf/, and superseded/
with what a resumed run does again. The first rank writes the small files; checkpoints and the final model are written by
all.
"""

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.checkpoint.async_saver import Saver
from dovetail.checkpoint.retention import NONE, Retention, clear_debris, set_aside
from dovetail.checkpoint.train_state import MODEL_ROLE
from dovetail.engine.base import Engine
from dovetail.errors import CheckpointError, ConfigError
from dovetail.jsonl import append
from dovetail.parallel.collectives import gather_text, stack_over
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rl.experience import Sample
from dovetail.rl.step_metrics import Row
from dovetail.rl.trainer import Outcome
from dovetail.run.console import Console, curve
from dovetail.run.lock import RunLock, refuse_unshared
from dovetail.run.metrics import METRICS, Metrics, check_loggers
from dovetail.run.records import Records, write_samples
from dovetail.run.resume import CHECKPOINTS, CONFIG, EVENTS, HF, Resumed, find, is_run
from dovetail.run.state import RunState, random_state, restore_random_state
from dovetail.weights.atomic import make_directory, refuse_unwritable, replace_file
from dovetail.weights.safe_paths import SideFiles
from dovetail.weights.stream import Export

POLICY, CRITIC = MODEL_ROLE, "critic"
ROLLOUTS, SUPERSEDED = "rollouts", "superseded"
ROOM_FOR = 2  # checkpoints that must fit when a run starts: the old one stays until the new one is whole
NUMBERED = re.compile(r"step_(\d+)\.")  # the samples of a step
MOST_FAILED_SAVES = 3  # in a row; above it a run that cannot be saved stops


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where to write and how much of it to keep. `peak_flops`: of one device, for `mfu`; None where it is not known.

    resume: auto, never or step=N. background: checkpoints are written while training goes on. evaluates: some steps end
    with an evaluation, and then no other step has a score. stop_signal: the one that asked this rank to stop, 0: none did.
    """

    path: Path
    config: Mapping[str, Any]
    config_yaml: str
    steps: int
    saves: bool
    retention: Retention
    background: bool
    evaluates: bool
    resume: str
    loggers: tuple[str, ...]
    peak_flops: float | None
    peak_memory_gib: Callable[[], float]
    stop_signal: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a run saves: its engines by role, files beside the model, fingerprints, and the cursor after a step."""

    engines: Mapping[str, Engine]
    sides: SideFiles
    model: str
    data: str
    cursor: Callable[[int], int]


class RunDirectory:
    """Implements `trainer.Run`: metrics, samples, checkpoints and the final model of one run."""

    def __init__(self, settings: RunSettings, mesh: Mesh) -> None:
        self.settings, self.mesh, self.path = settings, mesh, settings.path
        self.lead = mesh["world"].rank == 0
        self.console = Console(speaks=self.lead, steps=settings.steps)
        self._records = Records(self.console.say)
        self.resumed: Resumed | None = None
        self._lock = RunLock(self.path)
        self._metrics: Metrics | None = None
        self._before: Row = {}
        self._earlier: list[Row] = []
        self._score: float | None = None
        self.stop_signal = 0  # that any rank got: the same on all
        self._saved: int | None = None  # the step of the newest whole checkpoint
        self._saving = self._order = self._failed_saves = 0
        self._there = False
        self._at_close = ExitStack()

    def claim(self, damaged: Mapping[str, str] = NONE) -> None:
        """Find out what is there: nothing, or a run to go on from; refuse all else, and what the run would fail on later.

        `damaged`: steps not to go on from, and why. Collective; writes nothing but the lock of a run that is there.
        """
        mode = self.settings.resume
        with agreed(self.mesh):
            check_loggers(self.settings.loggers)
            if self.lead:
                refuse_unwritable(self.path / CONFIG if self.path.is_dir() else self.path, "run_dir")
                self._there = is_run(self.path)
                if self._there and mode == "never":
                    raise ConfigError(
                        f"run_dir {self.path} is not empty; choose another run_dir, or move that one away: it holds a run, "
                        "from which --resume auto would go on"
                    )
                if mode.startswith("step=") and not self._there:
                    raise ConfigError(f"--resume {mode}: run_dir {self.path} holds no run; leave it out to begin one")
                if self._there:
                    self._lock.take()
        refuse_unshared(self.path, self.mesh)
        self._there = of_first(self._there, self.mesh)
        if self._there:
            self.resumed = find(self.path, self.mesh, mode, self.settings.config, damaged)

    def check_space(self, contents: Contents) -> None:
        """Refuse to start where two checkpoints, or without any the final model, would not fit on the disk. Collective."""
        saves, exports = self.settings.saves, _exports(contents)
        needed = sum(spec.num_bytes for e in (exports if saves else exports[:1]) for spec in e.specs.values())
        needed *= ROOM_FOR if saves else 1
        wanted = f"{ROOM_FOR} checkpoints take" if saves else "the final model takes"
        otherwise = "choose another run_dir, or set trainer.save_every=0" if saves else "or choose another run_dir"
        with agreed(self.mesh):
            if self.lead:
                folder = next(f for f in (self.path.absolute(), *self.path.absolute().parents) if f.exists())
                total, _, free = shutil.disk_usage(folder)
                if free < needed and total:  # a total of 0: the system does not tell
                    raise ConfigError(
                        f"run_dir {self.path}: {free / 1e9:.2g} GB are free, but {wanted} {needed / 1e9:.2g} GB; free some, "
                        f"{otherwise}"
                    )

    def open(self, contents: Contents) -> None:
        """Make the directory and its first files, or go on with those of an earlier start. Collective."""
        self.contents, resumed = contents, self.resumed
        self.run_id = of_first(uuid.uuid4().hex, self.mesh)
        if resumed is not None:
            self.run_id, self._before = resumed.state.run_id, dict(resumed.state.before)
            self._saved = resumed.state.step
        with agreed(self.mesh):
            if self.lead:
                make_directory(self.path / ROLLOUTS)
                self._lock.take()
                if is_run(self.path) != self._there:
                    raise ConfigError(
                        f"another run began in run_dir {self.path} meanwhile; start again to go on from it"
                    )
                self._clear_away()
                replace_file(self.path / CONFIG, self.settings.config_yaml.encode())
                self._metrics = Metrics(self.path, self.settings.loggers, self.settings.config, self.console.say)
        self._order, self._earlier = of_first([self._order, self._earlier], self.mesh)
        self._saver = Saver(
            self.path / CHECKPOINTS, self.mesh, self.settings.retention, background=self.settings.background
        )
        self._at_close.callback(self._saver.join)
        if resumed is not None:
            self._tell(resumed)

    def earlier(self) -> tuple[int, list[Row], Row] | None:
        """Steps before this start, their rows, and the evaluation before training, of a run that goes on."""
        return None if self.resumed is None else (self.resumed.state.step, list(self._earlier), self._before)

    def start(self, evaluation: Row) -> None:
        self._before = evaluation
        if evaluation and self.resumed is None:
            self.say("before training: " + _numbers(evaluation))
            if math.isnan(evaluation.get("eval_reward_mean", 0.0)):
                self.say(
                    "warning: the reward returned None for every sample of data.eval; without a number nothing is trained"
                )
        self.console.start()

    def record(self, row: Row, samples: Seq[Sample]) -> None:
        """Write and show one step's row, in the row's final form, and its samples."""
        flops = row.pop("flops", 0.0)
        row["peak_memory_gib"] = self.settings.peak_memory_gib()
        if self.settings.peak_flops is not None:
            row["mfu"] = flops / row["step_seconds"] / (self.settings.peak_flops * self.mesh["world"].size)
        with agreed(self.mesh):
            if self._metrics is not None:
                self._records.write(partial(self._metrics.write, row))
                if samples:
                    path = self.path / ROLLOUTS / f"step_{row['step']:06}.jsonl"
                    self._records.write(partial(write_samples, path, samples))
        self._score = _score(row, evaluates=self.settings.evaluates)
        self.console.step(row)

    def checkpoint(self, step: int) -> None:
        """All that training goes on from, as checkpoints/step_NNNNNN; older ones go as `retention` says. Collective."""
        self._settle()
        self._order += 1
        self._saving = step
        contents, state = self.contents, self._state(step)
        self._saver.save(step, _exports(contents), contents.sides, state.dump())
        if not self.settings.background:
            self._settle()

    def stopping(self) -> bool:
        """Whether somebody asked the run to stop. A save that went wrong meanwhile is told here, on every rank."""
        facts = [self.settings.stop_signal(), self._saver.done]
        told = stack_over(torch.tensor(facts, dtype=torch.int64, device=self.mesh.device), self.mesh["world"])
        if told[:, 1].all():
            self._settle()
        self.stop_signal = min((number for number in told[:, 0].tolist() if number), default=0)
        return self.stop_signal != 0

    def shared(self, seconds: float) -> float:
        own = torch.tensor(seconds, dtype=torch.float64, device=self.mesh.device)
        return float(stack_over(own, self.mesh["world"])[0])

    def say(self, text: str) -> None:
        self.console.say(text)

    def event(self, kind: str, **facts: Any) -> None:
        """One line in events.jsonl: what befell the run beside its steps. Collective."""
        with agreed(self.mesh):
            if self.lead:
                row = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **facts}
                self._records.write(partial(append, self.path / EVENTS, row))

    def finish(self, outcome: Outcome) -> None:
        """Write hf/ unless the run was stopped, and sum up. Collective."""
        try:
            if not outcome.stopped:
                self.contents.engines[POLICY].save_pretrained(self.path / HF)
        finally:  # neither is lost for the other's failure
            self._settle(last=True)
        with agreed(self.mesh):
            self._records.settle()
        self.close()
        key = "reward_mean" if outcome.rows and "reward_mean" in outcome.rows[-1] else "loss"
        values = [float(row[key]) for row in outcome.rows if row.get(key) is not None]
        if chart := curve(values):
            self.say(f"\n{key} over {len(outcome.rows)} steps\n{chart}")
        self.say("")
        for name in outcome.before:
            if name in outcome.after:
                self.say(f"{name:<18} {outcome.before[name]:.3f} -> {outcome.after[name]:.3f}")
        seconds = sum(row["step_seconds"] for row in outcome.rows)
        tokens = sum(row["tokens"] for row in outcome.rows)
        self.say(f"{'tokens/s':<18} {tokens / max(seconds, 1e-9):,.0f} ({seconds:.0f} s)")
        if not outcome.stopped:
            self.say(f"{'model':<18} {self.path / HF}")
        elif self._saved is None:
            self.say(f"{'model':<18} not written: stopped, and there is no checkpoint")
        else:
            self.say(f"{'model':<18} not written: stopped; the same command goes on from the checkpoint")
            self.say(f"{'checkpoint':<18} {self.path / CHECKPOINTS / f'step_{self._saved:06}'}")

    def close(self) -> None:
        """End the display and the loggers, and leave the directory to others; may be called twice.

        A save that is under way comes to its end first: a run that fails loses no checkpoint that it has asked for.
        """
        self._at_close.close()
        self.console.stop()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._lock.release()

    def _settle(self, *, last: bool = False) -> None:
        """Wait for the save that is under way. A failed one is told; training goes on unless it was the last, or too many."""
        try:
            if self._saver.finish():
                self._failed_saves, self._saved = 0, self._saving
        except CheckpointError as error:
            self._failed_saves += 1
            self.event("save_failed", cause=str(error))
            if last or self._failed_saves == MOST_FAILED_SAVES:
                raise CheckpointError(f"the run cannot be saved; what was saved before is whole\n{error}") from error
            self.say(f"A SAVE FAILED, the run goes on and earlier checkpoints are whole: {error}")

    def _state(self, step: int) -> RunState:
        mesh = self.mesh
        rng = gather_text(json.dumps(random_state(mesh.device)), mesh["world"], mesh.device)
        return RunState(
            run_id=self.run_id,
            order=self._order,
            step=step,
            score=self._score,
            recipe=self.settings.config,
            model=self.contents.model,
            data=self.contents.data,
            cursor=self.contents.cursor(step),
            updates={role: engine.updates for role, engine in self.contents.engines.items()},
            before=self._before,
            rng=[json.loads(text) for text in rng],
        )

    def _tell(self, resumed: Resumed) -> None:
        """Say and note what the run goes on from; set the random generators where the ranks are as many as then."""
        state, world = resumed.state, self.mesh["world"]
        if len(state.rng) == world.size:
            restore_random_state(state.rng[world.rank], self.mesh.device)
        for problem in resumed.passed_over:
            self.event("checkpoint_passed_over", cause=problem)
            self.say(f"passed over: {problem}")
        for change in resumed.changes:
            self.say(f"changed since then: {change}")
        self.event("resumed", step=state.step, path=str(resumed.reader.path), changes=list(resumed.changes))
        self.say(f"resumed after step {state.step} from {resumed.reader.path}")

    def _clear_away(self) -> None:
        """Put what an earlier start wrote beyond the resumed step into superseded/, so that the run has one past.

        Checkpoints go first: whatever is resumed after a kill in here finds the rows that belong to it. The lead's work.
        """
        state = None if self.resumed is None else self.resumed.state
        step, self._order = (0, 0) if state is None else (state.step, state.order)
        clear_debris(self.path)
        clear_debris(self.path / CHECKPOINTS)
        aside = self.path / SUPERSEDED
        taken = [int(path.name) for path in aside.glob("*") if path.name.isdecimal()]
        aside = aside / f"{1 + max(taken, default=0):03}"  # older ones may be gone, to make room
        set_aside(self.path / CHECKPOINTS, self._order, aside / CHECKPOINTS)
        self._earlier, kept, rest = _rows(self.path / METRICS, step)
        numbered = [(path, NUMBERED.match(path.name)) for path in (self.path / ROLLOUTS).glob("step_*")]
        late = [path for path, number in numbered if number is not None and int(number[1]) > step]
        late += [path for path in (self.path / HF,) if os.path.lexists(path)]
        if rest or late:
            aside.mkdir(parents=True, exist_ok=True)
            for path in late:
                path.rename(aside / path.name)
        if rest:
            replace_file(aside / METRICS, "".join(rest).encode())
        if rest or kept:  # a kill may have cut the end of the last line
            replace_file(self.path / METRICS, "".join(kept).encode())


def _exports(contents: Contents) -> list[Export]:
    """Everything that a checkpoint holds of all engines."""
    engines = contents.engines.items()
    return [export for role, engine in engines for export in engine.export_training(role, with_model=role == POLICY)]


def _score(row: Row, *, evaluates: bool) -> float | None:
    """How good the model is after a step, higher is better; None where it was not measured as at other steps."""
    if not evaluates:
        return row.get("reward_mean", -row["loss"])
    return row.get("eval_reward_mean", -row["eval_loss"] if "eval_loss" in row else None)


def _rows(path: Path, last: int) -> tuple[list[Row], list[str], list[str]]:
    """The rows of a metrics file up to step `last`, their lines, and the lines behind, of which a kill may have cut one."""
    text = path.read_text(encoding="utf-8", errors="replace").rstrip("\n") if path.exists() else ""
    lines = [f"{line}\n" for line in text.split("\n")] if text else []
    rows: list[Row] = []
    for line in lines:
        row = _row(line)
        if row is None or row["step"] > last:
            break
        rows.append(row)
    return rows, lines[: len(rows)], lines[len(rows) :]


def _row(line: str) -> Row | None:
    """A line of a metrics file; None where it is none that a run has written, so that what is read of it may be missing."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    sound = isinstance(row, dict) and "loss" in row
    return (
        row if sound and all(type(row.get(key)) in (int, float) for key in ("step", "tokens", "step_seconds")) else None
    )


def _numbers(row: Row) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in row.items())
