"""`dovetail report`."""

import argparse
import time
from pathlib import Path

from dovetail.launch.process import put
from dovetail.records.runs import check_runs
from dovetail_tools.report.page import write_report


def run(args: argparse.Namespace) -> None:
    paths = [Path(path) for path in args.runs]
    check_runs(paths)
    out = Path(args.out or paths[0] / "report.html")
    finished = write_report(paths, out, args.watch)
    put(f"wrote {out}\n")
    while args.watch and not finished:
        time.sleep(args.watch)
        finished = write_report(paths, out, args.watch)
