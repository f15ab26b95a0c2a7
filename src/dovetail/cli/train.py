"""`dovetail train`: the main job, from an HF checkpoint to an HF checkpoint."""

import argparse
import signal
from pathlib import Path

from dovetail.cli.arguments import recipe_of
from dovetail.factory.job import Builder
from dovetail.launch.progress import Progress
from dovetail.launch.rank import INTERRUPTED, STOPPED
from dovetail.launch.streams import complain, put
from dovetail.parallel.process_group import StopSignal, deterministic, pick_device
from dovetail.run.resume import FinishedError
from dovetail.run.trainer import train


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Train by the recipe. After a stop 130 or 143 on every rank, by the signal that asked for it.

    Until training starts there is nothing to finish or to save, so a signal ends the rank as it does in any command.
    """
    recipe, folder, stop = recipe_of(args), Path(args.recipe).parent, StopSignal()
    builder = Builder(recipe, pick_device(args.device), folder, lambda: stop.number, args.resume, progress)
    lead = builder.mesh["world"].rank == 0
    try:
        job = builder.job()
    except FinishedError as finished:
        if lead:
            complain(f"dovetail: {finished}\n")
            put(recipe.to_yaml() if args.dry_run else "")
        return 0
    try:
        if args.dry_run:
            if lead:
                put(recipe.to_yaml())
            return 0
        with stop, deterministic(recipe.trainer.deterministic):
            job.start()
            outcome = train(job.task, job.run, recipe.trainer, progress)
            progress.phase("save")
            job.run.finish(outcome)
    finally:
        job.close()
    if not outcome.stopped:
        return 0
    return INTERRUPTED if job.run.stop_signal == signal.SIGINT else STOPPED
