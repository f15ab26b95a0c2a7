"""`dovetail rollouts`."""

import argparse
from pathlib import Path

from dovetail.errors import DataError
from dovetail.launch.process import put
from dovetail.records.runs import check_runs, sample_files
from dovetail.records.samples import describe, select, sort


def run(args: argparse.Namespace) -> None:
    path = Path(args.run)
    check_runs([path])
    rows = sort(select(path, args.step, args.prompt, args.search), args.sort, args.limit)
    put("".join(map(describe, rows)))
    if not rows:
        steps = sorted({file.step for file in sample_files(path)})
        known = (
            f"it has samples of steps {steps[0]} to {steps[-1]}"
            if steps
            else "it has none yet; sft draws none"
        )
        raise DataError(f"{path} has no such sample; {known}")
