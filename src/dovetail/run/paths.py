"""Names in a run's directory, and who may write there. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.recipe.yaml import flat
from dovetail.weights.safe_paths import LEFTOVERS, refuse_unwritable

CONFIG = "config.yaml"
HF = "hf"
CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"
ROLLOUTS = "rollouts"
EVAL = "eval"
PROFILE = "profile"
SUPERSEDED = "superseded"
LOCK = ".lock"
POOL = "pool"  # finished groups of an asynchronous run
BEFORE_CONFIG = frozenset({LOCK, EVENTS, ROLLOUTS, "logs"})  # older than config.yaml
# Prefixes of keys that change no number.
WITHOUT_EFFECT = (
    "layout", "critic.layout", "reference.layout", "teacher.layout", "rollout.layout", "rollout.engines", "rollout.start",
    "rollout.request_timeout", "trainer.save_every", "trainer.save_on_stop", "trainer.keep_last", "trainer.async_save",
    "trainer.loggers", "trainer.timeouts", "trainer.check_replicas_every",
    "trainer.max_skipped_steps", "trainer.activation_checkpointing", "trainer.offload_", "trainer.mlp_tile_tokens",
)  # fmt: skip
OCCUPIED = "run_dir {} is not empty; choose another run_dir, or move that one away"


class FinishedError(Exception):
    def __init__(self, path: Path) -> None:
        saved = any((path / CHECKPOINTS).glob("step_*"))
        further = (
            "raise trainer.steps to train on" if saved else "choose another run_dir to train again"
        )
        super().__init__(
            f"run_dir {path} holds this run, which is finished: nothing to do ({path / HF}); "
            f"{further}"
        )


def is_run(path: Path) -> bool:
    """ConfigError for anything else than a run."""
    if not path.exists():
        return False
    entries = path.iterdir() if path.is_dir() else [path]
    names = {entry.name for entry in entries if not any(map(entry.match, LEFTOVERS))}
    if CONFIG not in names and names - BEFORE_CONFIG:
        raise ConfigError(
            f"{OCCUPIED.format(path)}: it holds no run to go on from ({CONFIG} is missing)"
        )
    return CONFIG in names


def check_run_dir(path: Path, resume: str) -> bool:
    """Whether a run exists. ConfigError if `--resume` does not allow this one."""
    refuse_unwritable(path / CONFIG if path.is_dir() else path, "run_dir")
    existed = is_run(path)
    if existed and resume == "never":
        raise ConfigError(
            f"{OCCUPIED.format(path)}: it holds a run, which --resume auto would go on from"
        )
    if resume.startswith("step=") and not existed:
        raise ConfigError(
            f"--resume {resume}: run_dir {path} holds no run; leave it out to begin one"
        )
    return existed


def with_effect(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Changes that would change the numbers of a finished run."""
    return {key: change for key, change in changes.items() if not key.startswith(WITHOUT_EFFECT)}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (before, now), without run_dir."""
    old = flat(before)
    new = flat(now)
    keys = [key for key in {**old, **new} if key != "run_dir"]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
