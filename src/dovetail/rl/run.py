"""The directory of a run: what is written where, by whom, and what the terminal shows.

run_dir/config.yaml, metrics.jsonl, rollouts/step_000001.jsonl, checkpoints/step_000050, hf/. The first rank writes the
small files; checkpoints and the final model are written by all.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.checkpoint.retention import keep_latest
from dovetail.comm import stack_over
from dovetail.engine.base import Engine
from dovetail.errors import ConfigError
from dovetail.log import Console, curve
from dovetail.mesh import Mesh
from dovetail.metrics import Metrics, check_loggers, json_line
from dovetail.rl.experience import Sample
from dovetail.rl.replay import write_routes
from dovetail.rl.trainer import Outcome, Row
from dovetail.weights.agree import agreed
from dovetail.weights.staging import refuse_unwritable


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where to write and how much of it to keep. `peak_flops`: of one device, for `mfu`; None where it is not known."""

    path: Path
    config: Mapping[str, Any]
    config_yaml: str
    steps: int
    keep: int
    loggers: tuple[str, ...]
    peak_flops: float | None
    peak_memory_gib: Callable[[], float]
    stop_requested: Callable[[], bool]


class RunDirectory:
    """Implements `trainer.Run`: metrics, samples, checkpoints and the final model of one run."""

    def __init__(self, settings: RunSettings, mesh: Mesh) -> None:
        self.settings, self.mesh = settings, mesh
        self.lead = mesh["world"].rank == 0
        self.console = Console(speaks=self.lead, steps=settings.steps)
        self._metrics: Metrics | None = None
        self._policy: Engine | None = None

    def claim(self) -> None:
        """Refuse a directory that holds anything, and what the run would fail on later. Collective; writes nothing."""
        with agreed(self.mesh):
            check_loggers(self.settings.loggers)
            path = self.settings.path
            if self.lead:
                refuse_unwritable(path, "run_dir")
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ConfigError(f"run_dir {path} is not empty; choose another run_dir, or move that one away")

    def open(self, policy: Engine) -> None:
        """Make the directory and its first files. Collective."""
        self._policy = policy
        path = self.settings.path
        with agreed(self.mesh):
            if self.lead:
                (path / "rollouts").mkdir(parents=True)
                (path / "config.yaml").write_text(self.settings.config_yaml, encoding="utf-8")
                self._metrics = Metrics(path, self.settings.loggers, self.settings.config, self.console.say)

    def start(self, evaluation: Row) -> None:
        if evaluation:
            self.say("before training: " + _numbers(evaluation))
        self.console.start()

    def record(self, row: Row, samples: Seq[Sample]) -> None:
        """Write and show one step's row, in the row's final form, and its samples."""
        flops = row.pop("flops", 0.0)
        row["peak_memory_gib"] = self.settings.peak_memory_gib()
        if self.settings.peak_flops is not None:
            row["mfu"] = flops / row["step_seconds"] / (self.settings.peak_flops * self.mesh["world"].size)
        with agreed(self.mesh):
            if self._metrics is not None:
                self._metrics.write(row)
                if samples:
                    path = self.settings.path / "rollouts" / f"step_{row['step']:06}.jsonl"
                    _write_samples(path, samples)
                    write_routes(path.with_suffix(".routing.safetensors"), [s.completion.routing for s in samples])
        self.console.step(row)

    def checkpoint(self, step: int) -> None:
        """The policy's pieces as checkpoints/step_NNNNNN; older ones beyond `keep` go. Collective."""
        assert self._policy is not None, "open() comes first"
        folder = self.settings.path / "checkpoints"
        self._policy.save_sharded(folder, step=step)
        with agreed(self.mesh):
            if self.lead:
                keep_latest(folder, self.settings.keep)

    def stopping(self) -> bool:
        asked = torch.tensor(self.settings.stop_requested(), dtype=torch.int64, device=self.mesh.device)
        return bool(stack_over(asked, self.mesh["world"]).any())

    def shared(self, seconds: float) -> float:
        own = torch.tensor(seconds, dtype=torch.float64, device=self.mesh.device)
        return float(stack_over(own, self.mesh["world"])[0])

    def say(self, text: str) -> None:
        self.console.say(text)

    def finish(self, outcome: Outcome) -> None:
        """Write hf/ unless the run was stopped, and sum up. Collective."""
        assert self._policy is not None, "open() comes first"
        path = self.settings.path
        if not outcome.stopped:
            self._policy.save_pretrained(path / "hf")
        self.close()
        key = "reward_mean" if outcome.rows and "reward_mean" in outcome.rows[-1] else "loss"
        self.say(f"\n{key} over {len(outcome.rows)} steps\n{curve([float(row[key]) for row in outcome.rows])}\n")
        for name in outcome.before:
            if name in outcome.after:
                self.say(f"{name:<18} {outcome.before[name]:.3f} -> {outcome.after[name]:.3f}")
        seconds = sum(row["step_seconds"] for row in outcome.rows)
        tokens = sum(row["tokens"] for row in outcome.rows)
        self.say(f"{'tokens/s':<18} {tokens / max(seconds, 1e-9):,.0f} ({seconds:.0f} s)")
        self.say(f"{'model':<18} " + ("not written: stopped" if outcome.stopped else str(path / "hf")))

    def close(self) -> None:
        """End the display and the loggers; may be called twice."""
        self.console.stop()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _write_samples(path: Path, samples: Seq[Sample]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for sample in samples:
            c = sample.completion
            row = {
                "id": sample.prompt.id,
                "sample": c.sample,
                "prompt": sample.prompt.prompt,
                "completion": sample.text,
                "answer": sample.prompt.answer,
                "reward": sample.reward,
                "finish": c.finish,
                "token_ids": list(c.ids),
                "log_probs": list(c.log_probs),
            }
            out.write(json_line(row))


def _numbers(row: Row) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in row.items())
