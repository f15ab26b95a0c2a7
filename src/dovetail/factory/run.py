"""A run from a recipe."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dovetail.checkpoint.retention import from_a_whole_step
from dovetail.factory.custom import load_algorithm
from dovetail.factory.engine import compile_kernels
from dovetail.factory.notes import notes
from dovetail.factory.opened import Opened
from dovetail.factory.rewards import Printed
from dovetail.factory.setup import Setup
from dovetail.factory.tasks import build_task
from dovetail.parallel.consensus import agreed
from dovetail.recipe.schema import Recipe
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.rl.reward_manager import RewardManager
from dovetail.run.callbacks import TrainerCallback
from dovetail.run.console import LOGS
from dovetail.run.directory import POLICY, Contents, RunDirectory
from dovetail.run.paths import CHECKPOINTS
from dovetail.run.resume import refuse_other
from dovetail.run.state import model_fingerprint
from dovetail.run.trainer import TrainTask

REWARDS_LOG = "rewards.log"  # what reward functions print


@dataclass(frozen=True)
class Run:
    """A run that is built and has written nothing.

    rewards: of RL. stream: of an asynchronous run. printed: by rewards and metrics.
    """

    recipe: Recipe
    task: TrainTask
    directory: RunDirectory
    contents: Contents
    rewards: RewardManager | None
    at_close: ExitStack
    notes: Sequence[str] = ()
    stream: AsyncSampler | None = None
    printed: Printed = field(default_factory=Printed)

    def start(self, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """Opens the directory and says the notes. Collective."""
        directory = self.directory
        after_save = None if self.stream is None else self.stream.saved
        directory.open(self.contents, callbacks, after_save)
        self.printed.log_to(directory.path / LOGS / REWARDS_LOG)
        for note in self.notes:
            directory.say(f"note: {note}")
        if self.stream is not None:
            resumed = directory.resumed
            exact = self.recipe.trainer.deterministic
            repeats = exact and resumed is not None and resumed.repeats
            for problem in self.stream.resume(repeats=repeats):
                directory.say(f"sampled again: {problem}")
        compile_kernels(self.contents.engines.values())

    def close(self) -> None:
        self.at_close.close()


def build_run(setup: Setup) -> Run:
    """Builds a run, and reports all mistakes in its recipe before anything is written. Collective."""
    checkpoints = Path(setup.recipe.run_dir) / CHECKPOINTS
    return from_a_whole_step(checkpoints, partial(_build_run, setup))


def _build_run(setup: Setup, damaged: Mapping[str, str]) -> Run:
    """damaged: checkpoints to pass over, and why."""
    start = setup.start
    directory = RunDirectory(
        setup.recipe, setup.mesh, start.resume, start.stop_signal, setup.progress
    )
    with ExitStack() as stack:
        stack.callback(directory.close)
        opened = claim(setup, directory, damaged, stack)
        with agreed(setup.mesh):
            algorithm = load_algorithm(setup.recipe, start.folder)
        built = build_task(algorithm, opened)
        if opened.resumed is not None:
            opened.resumed.reader.verify_checksums(setup.mesh, training=True)
        recipe = built.recipe
        directory.console.plan(recipe.trainer.steps)
        contents = Contents(
            engines=built.engines,
            auxiliary=built.engines[POLICY].origin.auxiliary,
            model=opened.weights,
            data=built.rows,
        )
        directory.check_space(contents)
        done = 0 if opened.resumed is None else opened.resumed.state.step
        return Run(
            recipe=recipe,
            task=built.task,
            directory=directory,
            contents=contents,
            rewards=built.rewards,
            at_close=stack.pop_all(),
            notes=notes(recipe, setup.source.config, built.lengths, setup.notes, done),
            stream=built.stream,
            printed=opened.printed,
        )


def claim(
    setup: Setup, directory: RunDirectory, damaged: Mapping[str, str], at_close: ExitStack
) -> Opened:
    """Locks the run directory, and finds what to resume, which must be of the same model. Collective."""
    if directory.lead and not setup.start.dry_run:
        setup.progress.listener = directory.console.phase
        directory.console.start()
    directory.lock_and_find_resume(damaged)
    source = setup.source
    weights = model_fingerprint(source.config, source.auxiliary, source.path, setup.mesh)
    if directory.resumed is not None:
        known = directory.resumed.state.model
        refuse_other("the model's config, tokenizer or weights", known, weights, "model.path")
    return Opened(setup, directory, weights, at_close, Printed())
