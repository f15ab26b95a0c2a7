"""`dovetail train`."""

import argparse
from pathlib import Path

from dovetail.cli.arguments import recipe_of
from dovetail.cli.header import header
from dovetail.factory.run import build_run
from dovetail.factory.setup import Start, prepare
from dovetail.factory.trainer import train_run
from dovetail.launch.process import complain, put
from dovetail.launch.progress import Progress
from dovetail.launch.rank import STOP_CODES, STOPPED
from dovetail.parallel.process_group import StopSignal, pick_device
from dovetail.run.paths import FinishedError


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Returns the exit code: 130 or 143 after a signal."""
    recipe = recipe_of(args)
    stop = StopSignal()
    device = pick_device(args.device)
    folder = Path(args.recipe).parent
    start = Start(device, folder, lambda: stop.number, args.resume, progress, args.dry_run)
    setup = prepare(recipe, start)
    is_first = setup.mesh["world"].rank == 0
    text = recipe.to_yaml() if args.dry_run and is_first else ""
    try:
        run = build_run(setup)
    except FinishedError as finished:
        complain(f"dovetail: {finished}\n" if is_first else "")
        put(text)
        return 0
    if args.dry_run:
        run.close()
        put(text)
        return 0
    run.directory.console.prepend(header(recipe, setup.mesh.layout, args.device))
    outcome = train_run(run, stop, progress)
    if not outcome.stopped:
        return 0
    return STOP_CODES.get(run.directory.stop_signal, STOPPED)
