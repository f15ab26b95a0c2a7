"""The directory of a run: what is written where, by whom, and what the terminal shows.

run_dir/config.yaml, metrics.jsonl, rollouts/step_000001.jsonl, checkpoints/step_000050, hf/. The first rank writes the
small files; checkpoints and the final model are written by all.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where to write and how much of it to keep. `peak_flops`: of one device, for `mfu`; None where it is not known."""

    path: Path
    config_yaml: str
    steps: int
    keep: int
    loggers: tuple[str, ...] = ()
    peak_flops: float | None = None
