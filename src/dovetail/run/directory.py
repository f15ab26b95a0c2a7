"""The directory of a run. Rank 0 writes small files, all ranks checkpoints/ and hf/.

superseded/ has files of steps that a resumed run repeats.
"""

import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.checkpoint.retention import NONE, Retention, clear_debris, oldest_of_last, set_aside
from dovetail.checkpoint.train_state import MODEL_ROLE
from dovetail.checkpoint.writer import Saver
from dovetail.device import peak_flops, peak_memory_gib, usage
from dovetail.engine.native import Engine
from dovetail.errors import CheckpointError, ConfigError, MachineError
from dovetail.jsonl import ODD_LETTERS, append, json_line
from dovetail.launch.progress import Progress
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.consensus import agreed, of_all, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.run.callbacks import Callbacks, TrainerState
from dovetail.run.console import Console, curve, log_path, note_failure, rank_log
from dovetail.run.learning import EQUAL, LearningNotes
from dovetail.run.lock import RunLock, refuse_unshared
from dovetail.run.loggers import RunFacts, check_loggers
from dovetail.run.metrics import METRICS, Metrics, Records, missing_rows, read_rows, write_samples
from dovetail.run.paths import CHECKPOINTS, CONFIG, EVENTS, HF, check_run_dir, is_run
from dovetail.run.profiler import Profiler
from dovetail.run.resume import Resumed, find
from dovetail.run.state import RunState, random_state, restore_random_state
from dovetail.run.trainer import Outcome, Row, evaluation_of
from dovetail.weights.atomic import make_directory, replace_file
from dovetail.weights.safe_paths import AuxiliaryFiles
from dovetail.weights.stream import Export

POLICY = MODEL_ROLE
CRITIC = "critic"
ROLLOUTS = "rollouts"
EVAL = "eval"
PROFILE = "profile"
SUPERSEDED = "superseded"
LOG = "console.log"
ROOM_FOR = 2  # checkpoints: old and new
OF_STEP = re.compile(r"step_(\d+)\.|step-(\d+)$")
MAX_FAILED_SAVES = 3  # in a row


@dataclass(frozen=True, kw_only=True)
class Contents:
    """model, data: fingerprints."""

    engines: Mapping[str, Engine]
    auxiliary: AuxiliaryFiles
    model: str
    data: str


class RunDirectory:
    """resume: auto, never or step=N. stop_signal: of this rank; 0: none."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        resume: str = "auto",
        stop_signal: Callable[[], int] = int,
        progress: Progress | None = None,
    ) -> None:
        trainer = recipe.trainer
        self.recipe = recipe
        self.mesh = mesh
        self.path = Path(recipe.run_dir)
        self.config = recipe.model_dump(mode="json", by_alias=True)
        self.retention = Retention(trainer.keep_last, trainer.keep_every, trainer.keep_best)
        self.lead = mesh["world"].rank == 0
        self.console = Console(speaks=self.lead, steps=trainer.steps)
        self.say = self.console.say
        self.profiler = Profiler(
            trainer.profile, self.path / PROFILE, mesh, progress or Progress(), self.say
        )
        self.resumed: Resumed | None = None
        self.stop_signal = 0  # of any rank
        self._resume = resume
        self._stop_signal = stop_signal
        self._quiet = progress is not None and progress.is_watched
        self._rank_log = log_path(self.path, mesh["world"].rank)
        self.on = Callbacks(TrainerState(recipe, self.lead), mesh)
        self.after_save: Callable[[int], None] | None = None  # takes the oldest kept step
        self._records = Records(self.say)
        self._lock = RunLock(self.path)
        self._notes = LearningNotes(recipe)
        self._metrics: Metrics | None = None
        self._before: Row = {}
        self._earlier: list[Row] = []
        self._score: float | None = None
        self._saved: int | None = None  # the step of the newest whole checkpoint
        self._saving = self._order = self._failed_saves = 0
        self._existed = False
        self._at_close = ExitStack()
        self._at_close.callback(self.console.stop)
        self._at_close.callback(self._lock.release)

    @property
    def first_row(self) -> int:
        """Row of the data stream at step 0."""
        state = None if self.resumed is None else self.resumed.state
        return (
            0 if state is None else state.cursor - state.step * self.recipe.trainer.prompts_per_step
        )

    def claim(self, damaged: Mapping[str, str] = NONE) -> None:
        """Collective. Lock the directory and find what to resume. damaged: steps to skip, and why."""
        with agreed(self.mesh, self.path):
            check_loggers(self.recipe.trainer.loggers)
            if self.lead:
                self._existed = check_run_dir(self.path, self._resume)
                if self._existed:
                    self._lock.acquire()
        refuse_unshared(self.path, self.mesh)
        self._existed = of_first(self._existed, self.mesh)
        if self._existed:
            self.resumed = find(self.path, self.mesh, self._resume, self.config, damaged)

    def check_space(self, contents: Contents) -> None:
        """Collective."""
        saves = self.recipe.trainer.save_every > 0
        exports = _exports(contents)
        needed = sum(
            spec.num_bytes for e in (exports if saves else exports[:1]) for spec in e.specs.values()
        )
        needed *= ROOM_FOR if saves else 1
        wanted = f"{ROOM_FOR} checkpoints take" if saves else "the final model takes"
        remedy = (
            "choose another run_dir, or set trainer.save_every=0"
            if saves
            else "or choose another run_dir"
        )
        with agreed(self.mesh):
            if self.lead:
                folder = next(
                    f for f in (self.path.absolute(), *self.path.absolute().parents) if f.exists()
                )
                total, _, free = shutil.disk_usage(folder)
                if free < needed and total:  # total 0: unknown
                    room = f"{free / 1e9:.2g} GB are free, but {wanted} {needed / 1e9:.2g} GB"
                    raise MachineError(f"run_dir {self.path}: {room}; free some, {remedy}")

    def open(self, contents: Contents) -> None:
        """Collective."""
        self.contents = contents
        resumed = self.resumed
        self.run_id = of_first(uuid.uuid4().hex, self.mesh)
        if resumed is not None:
            state = resumed.state
            self.run_id = state.run_id
            self._before = dict(state.before)
            self._saved = state.step
        with agreed(self.mesh, self.path):
            if self.lead:
                make_directory(self.path / ROLLOUTS)
                self._lock.acquire()
                if is_run(self.path) != self._existed:
                    raise ConfigError(
                        f"another run began in run_dir {self.path}; start again to go on from it"
                    )
                self._set_later_aside()
                replace_file(self.path / CONFIG, self.recipe.to_yaml().encode())
                first = 1 if resumed is None else resumed.state.step + 1
                facts = RunFacts(
                    path=self.path, config=self.config, run_id=self.run_id, first_step=first
                )
                self._metrics = Metrics(facts, self.recipe.trainer.loggers, self.say)
                self._at_close.callback(self._metrics.close)
        name = f"rank {self.mesh['world'].rank} of {self.mesh['world'].size}"
        self._at_close.enter_context(
            rank_log(self._rank_log, name, quiet=self._quiet and not self.lead)
        )
        self.console.log_to(self.path / LOG, self._rank_log)
        self._order, self._earlier = of_first([self._order, self._earlier], self.mesh)
        for row in self._earlier:
            self._notes.of(row)
        background = self.recipe.trainer.async_save
        self._saver = Saver(
            self.path / CHECKPOINTS, self.mesh, self.retention, background=background
        )
        self._at_close.callback(self._saver.join)
        if resumed is not None:
            self._report_resume(resumed)

    def earlier(self) -> tuple[int, list[Row], Row] | None:
        """Of a resumed run: step, rows, first evaluation."""
        return (
            None
            if self.resumed is None
            else (self.resumed.state.step, list(self._earlier), self._before)
        )

    def start(self, evaluation: Row) -> None:
        """evaluation: before training."""
        self._before = evaluation
        if evaluation and self.resumed is None:
            self.say(
                "before training: "
                + "  ".join(f"{name} {value:.3f}" for name, value in evaluation.items())
            )
            if math.isnan(evaluation.get("eval_reward_mean", 0.0)):
                self.say(
                    "warning: the reward returned None for every sample of data.eval; nothing "
                    "trains without one"
                )
        self.console.start()

    def record(self, row: Row, samples: Seq[Row]) -> None:
        """Collective."""
        flops = row.pop("flops", 0.0)
        device = self.mesh.device
        row |= {
            "timestamp": time.time(),
            "peak_memory_gib": peak_memory_gib(device),
            **usage(device),
        }
        if (peak := peak_flops(device)) is not None:
            row["mfu"] = flops / row["step_seconds"] / (peak * self.mesh["world"].size)
        with agreed(self.mesh):
            if self._metrics is not None:
                self._records.write(partial(self._metrics.write, row, samples))
                if samples:
                    path = self.path / ROLLOUTS / f"step_{row['step']:06}.jsonl"
                    self._records.write(partial(write_samples, path, samples))
        self._score = row["reward_mean"] if "reward_mean" in row else -row["loss"]
        if self.recipe.trainer.eval_every and (
            self.recipe.data.eval or self.recipe.eval.sets
        ):  # None at other steps
            first = next(iter(evaluation_of(row).items()), None)
            self._score = None
            if first is not None:
                name, value = first
                self._score = -value if name.endswith("loss") else value
        self.console.step(row)
        for note in self._notes.of(row):
            self.say(f"note: {note}")

    def write_eval(self, name: str, step: int, samples: Seq[Row]) -> None:
        """Collective. name "": data.eval."""
        with agreed(self.mesh):
            if self._metrics is not None:
                make_directory(self.path / EVAL / name)
                self._records.write(
                    partial(
                        write_samples, self.path / EVAL / name / f"step_{step:06}.jsonl", samples
                    )
                )

    def add_evaluation(self, evaluation: Row) -> None:
        """Collective. Adds to the last row of an earlier start."""
        with agreed(self.mesh):
            if self._metrics is not None and self._earlier:
                rows = [*self._earlier[:-1], {**self._earlier[-1], **evaluation}]
                replace_file(
                    self.path / METRICS, "".join(map(json_line, rows)).encode(errors=ODD_LETTERS)
                )

    def checkpoint(self, step: int) -> None:
        self._finish_save()
        self._order += 1
        self._saving = step
        self._saver.save(
            step, _exports(self.contents), self.contents.auxiliary, dict(self._state(step))
        )
        if not self.recipe.trainer.async_save:
            self._finish_save()

    def stopping(self) -> bool:
        """Collective. Whether any rank got a stop signal; also ends finished saves."""
        own = [self._stop_signal(), self._saver.done, self.profiler.take_request()]
        ranks = stack_over(
            torch.tensor(own, dtype=torch.int64, device=self.mesh.device), self.mesh["world"]
        )
        if ranks[:, 1].all():
            self._finish_save()
        self.profiler.wanted |= bool(ranks[:, 2].any())
        self.stop_signal = min((number for number in ranks[:, 0].tolist() if number), default=0)
        return self.stop_signal != 0

    def shared(self, seconds: float) -> float:
        """Collective. Rank 0's value."""
        own = torch.tensor(seconds, dtype=torch.float64, device=self.mesh.device)
        return float(stack_over(own, self.mesh["world"])[0])

    def event(self, kind: str, **facts: Any) -> None:
        with agreed(self.mesh):
            if self.lead:
                row = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "kind": kind,
                    **facts,
                }
                self._records.write(partial(append, self.path / EVENTS, row))

    def finish(self, outcome: Outcome) -> None:
        """Collective."""
        try:
            if not outcome.stopped:
                self.contents.engines[POLICY].save_pretrained(self.path / HF)
        finally:
            self._finish_save(last=True)
        if outcome.early:
            self.event("ended_early", step=len(outcome.rows), cause=outcome.early)
        with agreed(self.mesh):
            self._records.flush()
        self.close()
        self._print_summary(outcome)

    def close(self) -> None:
        """Waits for the save under way. May be called twice."""
        self._at_close.close()
        self._metrics = None

    def note_failure(self, _: object, error: BaseException | None, __: object) -> None:
        note_failure(self._rank_log, error)

    def _print_summary(self, outcome: Outcome) -> None:
        key = "reward_mean" if outcome.rows and "reward_mean" in outcome.rows[-1] else "loss"
        values = [float(row[key]) for row in outcome.rows if row.get(key) is not None]
        if chart := curve(values):
            self.say(f"\n{key} over {len(outcome.rows)} steps\n{chart}")
        self.say("")
        for name in outcome.before:
            if name in outcome.after:
                self.say(f"{name:<18} {outcome.before[name]:.3f} -> {outcome.after[name]:.3f}")
        if outcome.early:
            steps = f"{len(outcome.rows)} of {self.recipe.trainer.steps} steps"
            self.say(f"{'ended early':<18} after {steps}: {outcome.early}")
        seconds = sum(row["step_seconds"] for row in outcome.rows)
        tokens = sum(row["tokens"] for row in outcome.rows)
        self.say(f"{'tokens/s':<18} {tokens / max(seconds, 1e-9):,.0f} ({seconds:.0f} s)")
        if outcome.rows and all(row.get("equal_groups") == 1.0 for row in outcome.rows):
            self.say(
                f"{'learned':<18} nothing: every group of samples had equal rewards, in every "
                f"step; {EQUAL}"
            )
        elif outcome.rows and not tokens:
            self.say(f"{'learned':<18} nothing: no step had a sample with a reward")
        if not outcome.stopped:
            self.say(f"{'model':<18} {self.path / HF}")
        elif self._saved is None:
            self.say(f"{'model':<18} not written: stopped, and there is no checkpoint")
        else:
            self.say(
                f"{'model':<18} not written: stopped; the same command goes on from the checkpoint"
            )
            self.say(f"{'checkpoint':<18} {self.path / CHECKPOINTS / f'step_{self._saved:06}'}")

    def _finish_save(self, *, last: bool = False) -> None:
        try:
            if self._saver.finish():
                self._failed_saves = 0
                self._saved = self._saving
                if self.after_save is not None:
                    with agreed(self.mesh):
                        if self.lead:
                            self.after_save(
                                oldest_of_last(self.path / CHECKPOINTS, self.retention.last)
                            )
                self.on("on_save", self.path / CHECKPOINTS / f"step_{self._saving:06}")
        except (CheckpointError, MachineError) as error:
            self._failed_saves += 1
            self.event("save_failed", cause=str(error))
            if last or self._failed_saves == MAX_FAILED_SAVES:
                kind = MachineError if isinstance(error, MachineError) else CheckpointError
                lost = "the run cannot be saved; what was saved before is whole"
                raise kind(f"{lost}\n{error}") from error
            self.say(f"A SAVE FAILED, the run goes on and earlier checkpoints are whole: {error}")

    def _state(self, step: int) -> RunState:
        return RunState(
            run_id=self.run_id, order=self._order, step=step, score=self._score, recipe=self.config, before=self._before,
            model=self.contents.model, data=self.contents.data,
            cursor=self.first_row + step * self.recipe.trainer.prompts_per_step,
            updates={role: engine.updates for role, engine in self.contents.engines.items()},
            rng=of_all(random_state(self.mesh.device), self.mesh),
        )  # fmt: skip

    def _report_resume(self, resumed: Resumed) -> None:
        state = resumed.state
        world = self.mesh["world"]
        if len(state.rng) == world.size:
            restore_random_state(state.rng[world.rank], self.mesh.device)
        for problem in resumed.passed_over:
            self.event("checkpoint_passed_over", cause=problem)
            self.say(f"passed over: {problem}")
        if gap := missing_rows(self._earlier, state.step):
            self.event("metrics_lost", cause=gap)
            self.say(f"{self.path / METRICS} {gap}; the run goes on")
        for change in resumed.changes:
            self.say(f"changed since then: {change}")
        self.event(
            "resumed", step=state.step, path=str(resumed.reader.path), changes=list(resumed.changes)
        )
        self.say(f"resumed after step {state.step} from {resumed.reader.path}")

    def _set_later_aside(self) -> None:
        """Move files of later steps into superseded/, checkpoints first."""
        state = None if self.resumed is None else self.resumed.state
        step, self._order = (0, 0) if state is None else (state.step, state.order)
        clear_debris(self.path)
        clear_debris(self.path / CHECKPOINTS)
        numbers = [
            int(path.name) for path in (self.path / SUPERSEDED).glob("*") if path.name.isdecimal()
        ]
        aside = (
            self.path / SUPERSEDED / f"{1 + max(numbers, default=0):03}"
        )  # numbers may have gaps
        set_aside(self.path / CHECKPOINTS, self._order, aside / CHECKPOINTS)
        self._earlier, kept, rest = read_rows(self.path / METRICS, step)
        files = [*(self.path / ROLLOUTS).glob("step_*"), *(self.path / EVAL).glob("**/step_*")]
        files += (self.path / PROFILE).glob("step-*")
        late = [
            path
            for path in files
            if (of := OF_STEP.match(path.name)) and int(of[1] or of[2]) > step
        ]
        late += [self.path / HF] if os.path.lexists(self.path / HF) else []
        if rest or late:
            aside.mkdir(parents=True, exist_ok=True)
            for path in late:
                folder = (
                    aside
                    if path.parent == self.path / ROLLOUTS
                    else aside / path.parent.relative_to(self.path)
                )
                folder.mkdir(parents=True, exist_ok=True)
                path.rename(folder / path.name)
        if rest:
            replace_file(aside / METRICS, "".join(rest).encode())
        if rest or kept:  # the last line may be torn
            replace_file(self.path / METRICS, "".join(kept).encode())


def _exports(contents: Contents) -> list[Export]:
    engines = contents.engines.items()
    return [
        export
        for role, engine in engines
        for export in engine.export_training(role, with_model=role == POLICY)
    ]
