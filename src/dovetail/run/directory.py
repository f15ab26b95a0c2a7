"""The directory of a run. Rank 0 writes small files, all ranks checkpoints/ and hf/.

superseded/ has files of steps that a resumed run repeats.
"""

import math
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

from dovetail.checkpoint.retention import NONE, Retention
from dovetail.checkpoint.train_state import MODEL_ROLE
from dovetail.device import peak_flops, peak_memory_gib, usage
from dovetail.engine.native import Engine
from dovetail.errors import ConfigError
from dovetail.jsonl import ODD_LETTERS, append, json_line
from dovetail.launch.progress import Progress
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.consensus import agreed, of_all, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.run.callbacks import Callbacks, TrainerCallback, TrainerState
from dovetail.run.checkpoints import RunCheckpoints, check_space
from dovetail.run.console import Console, log_path, note_failure, rank_log
from dovetail.run.learning import LearningNotes
from dovetail.run.lock import RunLock, refuse_unshared
from dovetail.run.loggers import RunFacts, check_loggers
from dovetail.run.metrics import METRICS, Metrics, Records, missing_rows, write_samples
from dovetail.run.outcome import Outcome, Row, evaluation_of
from dovetail.run.paths import CONFIG, EVAL, EVENTS, HF, PROFILE, ROLLOUTS, check_run_dir, is_run
from dovetail.run.profiler import Profiler
from dovetail.run.resume import Resumed, find
from dovetail.run.state import RunState, random_state, restore_random_state
from dovetail.run.summary import summary
from dovetail.run.superseded import set_later_aside
from dovetail.weights.atomic import make_directory, replace_file
from dovetail.weights.safe_paths import AuxiliaryFiles
from dovetail.weights.stream import Export

POLICY = MODEL_ROLE
CRITIC = "critic"
LOG = "console.log"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a run trains. engines: by role. model, data: fingerprints."""

    engines: Mapping[str, Engine]
    auxiliary: AuxiliaryFiles
    model: str
    data: str

    def exports(self) -> list[Export]:
        """The pieces of a checkpoint; the first is the model's."""
        return [
            export
            for role, engine in self.engines.items()
            for export in engine.export_training(role, with_model=role == POLICY)
        ]


class RunDirectory:
    """What a run reads and writes: its lock, metrics, samples, checkpoints, logs and final model.

    resume: auto, never or step=N. stop_signal: of this rank; 0: none.
    """

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
        self.callbacks = Callbacks(TrainerState(recipe, self.lead), mesh)
        self.after_save: Callable[[int], None] | None = None
        self._records = Records(self.say)
        self._lock = RunLock(self.path)
        self._notes = LearningNotes(recipe)
        self._metrics: Metrics | None = None
        self._before: Row = {}
        self._earlier: list[Row] = []
        self._score: float | None = None
        self._order = 0  # of the newest save
        self._existed = False
        self._at_close = ExitStack()
        self._at_close.callback(self.console.stop)
        self._at_close.callback(self._lock.release)

    @property
    def first_row(self) -> int:
        """Row of the data stream at step 0."""
        if self.resumed is None:
            return 0
        state = self.resumed.state
        return state.cursor - state.step * self.recipe.trainer.prompts_per_step

    def lock_and_find_resume(self, damaged: Mapping[str, str] = NONE) -> None:
        """Sets `resumed`. damaged: steps to skip, and why. Collective."""
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
        exports = contents.exports()
        saves = self.recipe.trainer.save_every > 0
        with agreed(self.mesh):
            if self.lead:
                check_space(self.path, exports if saves else exports[:1], saves=saves)

    def open(
        self,
        contents: Contents,
        callbacks: Seq[TrainerCallback] = (),
        after_save: Callable[[int], None] | None = None,
    ) -> None:
        """Begins to write. Collective. after_save: takes the oldest kept step."""
        self.contents = contents
        self.after_save = after_save
        self.callbacks.callbacks = callbacks
        self.callbacks.state.engine = contents.engines[POLICY]
        self.callbacks.state.critic = contents.engines.get(CRITIC)
        resumed = self.resumed
        self.run_id = of_first(uuid.uuid4().hex, self.mesh)
        step = 0
        if resumed is not None:
            step = resumed.state.step
            self.run_id = resumed.state.run_id
            self._before = dict(resumed.state.before)
            self._order = resumed.state.order
        with agreed(self.mesh, self.path):
            if self.lead:
                self._write_first_files(step)
        name = f"rank {self.mesh['world'].rank} of {self.mesh['world'].size}"
        self._at_close.enter_context(
            rank_log(self._rank_log, name, quiet=self._quiet and not self.lead)
        )
        self.console.log_to(self.path / LOG, self._rank_log)
        self._earlier = of_first(self._earlier, self.mesh)
        for row in self._earlier:
            self._notes.of(row)
        self.checkpoints = RunCheckpoints(
            self.path,
            self.mesh,
            self.retention,
            self.callbacks,
            self.event,
            self.say,
            background=self.recipe.trainer.async_save,
            saved_step=None if resumed is None else step,
        )
        self.checkpoints.after_save = self.after_save
        self._at_close.callback(self.checkpoints.close)
        if resumed is not None:
            self._report_resume(resumed)

    def _write_first_files(self, step: int) -> None:
        """step: of the checkpoint that the run goes on from."""
        make_directory(self.path / ROLLOUTS)
        self._lock.acquire()
        if is_run(self.path) != self._existed:
            raise ConfigError(
                f"another run began in run_dir {self.path}; start again to go on from it"
            )
        self._earlier = set_later_aside(self.path, step, self._order)
        replace_file(self.path / CONFIG, self.recipe.to_yaml().encode())
        facts = RunFacts(
            path=self.path, config=self.config, run_id=self.run_id, first_step=step + 1
        )
        self._metrics = Metrics(facts, self.recipe.trainer.loggers, self.say)
        self._at_close.callback(self._metrics.close)

    def earlier(self) -> tuple[int, list[Row], Row] | None:
        """Step, rows and first evaluation of a resumed run."""
        if self.resumed is None:
            return None
        return self.resumed.state.step, list(self._earlier), self._before

    def start(self, evaluation: Row) -> None:
        """evaluation: before training."""
        self._before = evaluation
        if evaluation and self.resumed is None:
            numbers = (f"{name} {value:.3f}" for name, value in evaluation.items())
            self.say("before training: " + "  ".join(numbers))
            if math.isnan(evaluation.get("eval_reward_mean", 0.0)):
                self.say(
                    "warning: the reward returned None for every sample of data.eval; nothing "
                    "trains without one"
                )
        self.console.start()

    def record(self, row: Row, samples: Seq[Row]) -> None:
        """Writes the row of a step to metrics.jsonl, loggers and the console. Collective."""
        flops = row.pop("flops", 0.0)
        device = self.mesh.device
        row["timestamp"] = time.time()
        row["peak_memory_gib"] = peak_memory_gib(device)
        row |= usage(device)
        peak = peak_flops(device)
        if peak is not None:
            row["mfu"] = flops / row["step_seconds"] / (peak * self.mesh["world"].size)
        with agreed(self.mesh):
            if self._metrics is not None:
                self._records.write(partial(self._metrics.write, row, samples))
                if samples:
                    path = self.path / ROLLOUTS / f"step_{row['step']:06}.jsonl"
                    self._records.write(partial(write_samples, path, samples))
        self._score = self._score_of(row)
        self.console.step(row)
        for note in self._notes.of(row):
            self.say(f"note: {note}")

    def _score_of(self, row: Row) -> float | None:
        """Higher is better: the evaluation, if steps are evaluated, else the reward or loss."""
        recipe = self.recipe
        if recipe.trainer.eval_every and (recipe.data.eval or recipe.eval.sets):
            evaluation = evaluation_of(row)
            if not evaluation:  # a step between two evaluations
                return None
            name = next(iter(evaluation))
            return -evaluation[name] if name.endswith("loss") else evaluation[name]
        return row["reward_mean"] if "reward_mean" in row else -row["loss"]

    def write_eval(self, name: str, step: int, samples: Seq[Row]) -> None:
        """name: "" for data.eval. Collective."""
        folder = self.path / EVAL / name
        with agreed(self.mesh):
            if self._metrics is not None:
                make_directory(folder)
                path = folder / f"step_{step:06}.jsonl"
                self._records.write(partial(write_samples, path, samples))

    def add_evaluation(self, evaluation: Row) -> None:
        """Adds to the last row of an earlier start. Collective."""
        with agreed(self.mesh):
            if self._metrics is not None and self._earlier:
                rows = [*self._earlier[:-1], {**self._earlier[-1], **evaluation}]
                text = "".join(map(json_line, rows))
                replace_file(self.path / METRICS, text.encode(errors=ODD_LETTERS))

    def checkpoint(self, step: int) -> None:
        """Collective."""
        self.checkpoints.finish()
        self._order += 1
        contents = self.contents
        self.checkpoints.save(self._state(step), contents.exports(), contents.auxiliary)

    def stopping(self) -> bool:
        """Whether any rank got a stop signal; also ends finished saves. Collective."""
        mine = [self._stop_signal(), self.checkpoints.is_done, self.profiler.take_request()]
        signals, are_done, profiles = self._of_ranks(mine).T.tolist()
        if all(are_done):
            self.checkpoints.finish()
        self.profiler.wanted |= any(profiles)
        self.stop_signal = min((number for number in signals if number), default=0)
        return self.stop_signal != 0

    def shared(self, seconds: float) -> float:
        """Returns rank 0's value. Collective."""
        return float(self._of_ranks(seconds, torch.float64)[0])

    def _of_ranks(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """[ranks, ...]; a tensor, as this is asked for several times a step. Collective."""
        mine = torch.tensor(values, dtype=dtype, device=self.mesh.device)
        return stack_over(mine, self.mesh["world"])

    def event(self, kind: str, **facts: Any) -> None:
        """Writes to events.jsonl. Collective."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"time": now, "kind": kind, **facts}
        with agreed(self.mesh):
            if self.lead:
                self._records.write(partial(append, self.path / EVENTS, row))

    def finish(self, outcome: Outcome) -> None:
        """Writes the final model, unless stopped, and says how the run went. Collective."""
        try:
            if not outcome.stopped:
                self.contents.engines[POLICY].save_pretrained(self.path / HF)
        finally:
            self.checkpoints.finish(is_last=True)
        if outcome.early:
            self.event("ended_early", step=len(outcome.rows), cause=outcome.early)
        with agreed(self.mesh):
            self._records.flush()
        self.close()
        steps = self.recipe.trainer.steps
        for line in summary(outcome, steps, self.path, self.checkpoints.saved_step):
            self.say(line)

    def close(self) -> None:
        """Waits for the save under way. May be called twice."""
        self._at_close.close()
        self._metrics = None

    def note_failure(self, _: object, error: BaseException | None, __: object) -> None:
        note_failure(self._rank_log, error)

    def _state(self, step: int) -> RunState:
        engines = self.contents.engines
        return RunState(
            run_id=self.run_id,
            order=self._order,
            step=step,
            score=self._score,
            recipe=self.config,
            before=self._before,
            model=self.contents.model,
            data=self.contents.data,
            cursor=self.first_row + step * self.recipe.trainer.prompts_per_step,
            updates={role: engine.updates for role, engine in engines.items()},
            rng=of_all(random_state(self.mesh.device), self.mesh),
        )

    def _report_resume(self, resumed: Resumed) -> None:
        state = resumed.state
        world = self.mesh["world"]
        if len(state.rng) == world.size:
            restore_random_state(state.rng[world.rank], self.mesh.device)
        for problem in resumed.passed_over:
            self.event("checkpoint_passed_over", cause=problem)
            self.say(f"passed over: {problem}")
        gap = missing_rows(self._earlier, state.step)
        if gap:
            self.event("metrics_lost", cause=gap)
            self.say(f"{self.path / METRICS} {gap}; the run goes on")
        for change in resumed.changes:
            self.say(f"changed since then: {change}")
        path = str(resumed.reader.path)
        self.event("resumed", step=state.step, path=path, changes=list(resumed.changes))
        self.say(f"resumed after step {state.step} from {path}")
