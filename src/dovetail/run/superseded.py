"""Files of steps that a resumed run repeats move to superseded/."""

import os
import re
from pathlib import Path

from dovetail.checkpoint.retention import clear_debris, set_aside
from dovetail.run.metrics import METRICS, read_rows
from dovetail.run.outcome import Row
from dovetail.run.paths import CHECKPOINTS, EVAL, HF, PROFILE, ROLLOUTS, SUPERSEDED
from dovetail.weights.atomic import replace_file

STEP_OF_FILE = re.compile(r"step_(\d+)\.|step-(\d+)$")


def set_later_aside(run_dir: Path, step: int, order: int) -> list[Row]:
    """Moves what is later than `step`, the `order`-th save, and returns the rows of metrics before.

    Checkpoints are moved first, so that a start that is cut short can be repeated.
    """
    clear_debris(run_dir)
    clear_debris(run_dir / CHECKPOINTS)
    aside = _next_folder(run_dir / SUPERSEDED)
    set_aside(run_dir / CHECKPOINTS, order, aside / CHECKPOINTS)
    rows, kept, rest = read_rows(run_dir / METRICS, step)
    later = _later_files(run_dir, step)
    if rest or later:
        aside.mkdir(parents=True, exist_ok=True)
    for path in later:
        folder = aside / path.parent.relative_to(run_dir)
        if path.parent == run_dir / ROLLOUTS:
            folder = aside
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    if rest:
        replace_file(aside / METRICS, "".join(rest).encode())
    if rest or kept:  # the last line may be torn
        replace_file(run_dir / METRICS, "".join(kept).encode())
    return rows


def _next_folder(superseded: Path) -> Path:
    """001, 002, ...; there may be gaps."""
    numbers = [int(path.name) for path in superseded.glob("*") if path.name.isdecimal()]
    return superseded / f"{1 + max(numbers, default=0):03}"


def _later_files(run_dir: Path, step: int) -> list[Path]:
    """Rollouts, evaluations and profiles of later steps, and the final model."""
    files = [*(run_dir / ROLLOUTS).glob("step_*"), *(run_dir / EVAL).glob("**/step_*")]
    files += (run_dir / PROFILE).glob("step-*")
    later = []
    for path in files:
        numbered = STEP_OF_FILE.match(path.name)
        if numbered and int(numbered[1] or numbered[2]) > step:
            later.append(path)
    if os.path.lexists(run_dir / HF):
        later.append(run_dir / HF)
    return later
