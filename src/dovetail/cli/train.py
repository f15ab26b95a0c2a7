"""`dovetail train`: the main job, from an HF checkpoint to an HF checkpoint."""

import argparse
import sys
from pathlib import Path

from dovetail.build.training import Builder
from dovetail.cli.arguments import recipe_of
from dovetail.launch import StopSignal, pick_device
from dovetail.rl.trainer import train


def run(args: argparse.Namespace) -> int:
    """Train by the recipe. 143 after a stop that was asked for by SIGTERM or SIGINT."""
    recipe = recipe_of(args)
    with StopSignal() as stop:
        builder = Builder(
            recipe, pick_device(args.device), Path(args.recipe).parent, lambda: stop.requested, args.resume
        )
        job = builder.job()
        try:
            if args.dry_run:
                if builder.mesh["world"].rank == 0:
                    sys.stdout.write(recipe.to_yaml())
                return 0
            job.start()
            outcome = train(job.task, job.run, job.loop)
            job.run.finish(outcome)
        finally:
            job.close()
    return StopSignal.EXIT_CODE if outcome.stopped else 0
