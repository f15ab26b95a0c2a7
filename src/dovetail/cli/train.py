"""`dovetail train`."""

import argparse
from pathlib import Path

from dovetail.cli.arguments import recipe_of
from dovetail.cli.header import header
from dovetail.factory.job import Builder
from dovetail.factory.trainer import run_job
from dovetail.launch.process import complain, put
from dovetail.launch.progress import Progress
from dovetail.launch.rank import STOP_CODES, STOPPED
from dovetail.parallel.process_group import StopSignal, pick_device
from dovetail.run.paths import FinishedError


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Exit code 130 or 143 after a signal."""
    recipe, folder, stop, device = (
        recipe_of(args),
        Path(args.recipe).parent,
        StopSignal(),
        pick_device(args.device),
    )
    builder = Builder(
        recipe, device, folder, lambda: stop.number, args.resume, progress, args.dry_run
    )
    is_first = builder.mesh["world"].rank == 0
    text = recipe.to_yaml() if args.dry_run and is_first else ""
    try:
        job = builder.job()
    except FinishedError as finished:
        complain(f"dovetail: {finished}\n" if is_first else "")
        put(text)
        return 0
    if args.dry_run:
        job.close()
        put(text)
        return 0
    job.run.console.prepend(header(recipe, builder.mesh.layout, args.device))
    outcome = run_job(job, stop, progress)
    return STOP_CODES.get(job.run.stop_signal, STOPPED) if outcome.stopped else 0
