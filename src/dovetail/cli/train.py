"""`dovetail train`: the main job, from an HF checkpoint to an HF checkpoint."""

import argparse
import sys
from pathlib import Path

from dovetail.build.training import Builder
from dovetail.cli.arguments import recipe_of
from dovetail.cli.ranks import STOPPED
from dovetail.errors import ConfigError
from dovetail.launch import StopSignal, pick_device, set_deterministic
from dovetail.rl.trainer import train
from dovetail.watch.progress import Progress

NOT_DETERMINISTIC = "does not have a deterministic implementation"  # of torch's message


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Train by the recipe. 143 after a stop that was asked for by SIGTERM or SIGINT.

    Until training starts there is nothing to finish or to save, so a signal ends the rank as it does in any command.
    """
    recipe, folder = recipe_of(args), Path(args.recipe).parent
    set_deterministic(recipe.trainer.deterministic)
    stop = StopSignal()
    builder = Builder(recipe, pick_device(args.device), folder, lambda: stop.requested, args.resume, progress)
    job = builder.job()
    try:
        if args.dry_run:
            if builder.mesh["world"].rank == 0:
                sys.stdout.write(recipe.to_yaml())
            return 0
        with stop:
            job.start()
            outcome = train(job.task, job.run, job.loop)
            progress.phase("save")
            job.run.finish(outcome)
    except RuntimeError as error:
        if NOT_DETERMINISTIC not in str(error):
            raise
        operation = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        raise ConfigError(
            f"trainer.deterministic=true: torch has no deterministic form of {operation}, which this model needs; set "
            "trainer.deterministic=false"
        ) from error
    finally:
        job.close()
    return STOPPED if outcome.stopped else 0
