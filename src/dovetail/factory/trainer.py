"""`dovetail train` from Python."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, LayoutError
from dovetail.factory.run import Run, build_run
from dovetail.factory.setup import Start, prepare
from dovetail.launch.progress import Progress, collective_timeout
from dovetail.parallel.consensus import refuse_different
from dovetail.parallel.process_group import (
    StopSignal,
    deterministic,
    pick_device,
    temporary_process_group,
)
from dovetail.recipe.schema import Recipe, load_recipe, make_recipe
from dovetail.recipe.yaml import flat
from dovetail.run.callbacks import TrainerCallback
from dovetail.run.outcome import Outcome
from dovetail.run.trainer import train


class Trainer:
    """Trains by a recipe as `dovetail train` does, in this process.

    recipe: a file, a mapping of its keys, or a Recipe. Functions that it imports are looked up next to the file, else in
    the working directory. callbacks: called in order. device: auto, cpu, cuda or npu. resume: auto, never or step=N.
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Any] | Recipe,
        callbacks: Sequence[TrainerCallback] = (),
        *,
        device: str = "auto",
        resume: str = "auto",
    ) -> None:
        self.recipe_folder = Path(recipe).parent if isinstance(recipe, (str, Path)) else Path()
        if isinstance(recipe, (str, Path)):
            recipe = load_recipe(recipe)
        self.recipe = make_recipe(recipe) if isinstance(recipe, Mapping) else recipe
        for each in callbacks:
            if not isinstance(each, TrainerCallback):
                raise ConfigError(
                    f"callbacks has {each!r}; expected objects of classes made from "
                    "dt.TrainerCallback"
                )
        self.callbacks = tuple(callbacks)
        self.device = device
        self.resume = resume

    def train(self) -> Outcome:
        """To the end of the run. Collective: a launcher (torchrun) starts the ranks, else this process is the only one.

        The first SIGTERM or Ctrl-C ends the step and saves; the outcome is `stopped`, and the next call goes on. Raises
        UserError for mistakes, CallbackError, and FinishedError if run_dir holds the finished run. An engine of this
        process keeps its process group; else the run has its own, which ends with it.
        """
        device = pick_device(self.device)
        stop = StopSignal()
        progress = Progress()
        with temporary_process_group(device, collective_timeout(self.recipe.trainer.timeouts)):
            keys = flat(self.recipe.model_dump(mode="json", by_alias=True))
            start = Start(device, self.recipe_folder, lambda: stop.number, self.resume, progress)
            try:
                setup = prepare(self.recipe, start)
            except LayoutError as error:
                raise LayoutError(
                    f"{error}; `torchrun --nproc-per-node N script.py` starts N ranks"
                ) from error
            refuse_different(
                {f"recipe: {key}": repr(keys[key]) for key in keys if key != "run_dir"},
                setup.mesh,
            )
            outcome = train_run(build_run(setup), stop, progress, self.callbacks)
            gc.collect()  # engines are cycles
        return outcome


def train_run(
    run: Run, stop: StopSignal, progress: Progress, callbacks: Sequence[TrainerCallback] = ()
) -> Outcome:
    """Trains to the end of a run, or until it is stopped, and closes it. Collective."""
    directory = run.directory
    with ExitStack() as stack:
        stack.callback(run.close)
        stack.push(directory.note_failure)
        stack.enter_context(stop)
        stack.enter_context(deterministic(run.recipe.trainer.deterministic))
        run.start(callbacks)
        outcome = train(run.task, directory, run.recipe.trainer, progress)
        progress.phase("save")
        directory.finish(outcome)
        directory.callbacks("on_train_end")
    return outcome
