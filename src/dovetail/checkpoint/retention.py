"""Which checkpoints of a run stay: the latest ones, counted by step."""

import re
import shutil
from pathlib import Path

STEP = re.compile(r"step_(\d{6,})(\.\w+)?")


def keep_latest(folder: Path, keep: int) -> None:
    """Remove all but the `keep` highest steps of `folder`. A directory is first renamed, so none is ever half there."""
    found: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        if match := STEP.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    for step in sorted(found)[:-keep]:
        for path in found[step]:
            if path.is_symlink():
                path.unlink()
        for path in found[step]:
            if path.is_dir() and not path.is_symlink():
                trash = path.with_name(f".trash-{path.name}")
                path.rename(trash)
                shutil.rmtree(trash)
