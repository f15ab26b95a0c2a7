"""metrics.jsonl and loggers. Loggers run in threads, so that their failures do not stop a run."""

import importlib
import importlib.util
import json
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.errors import ConfigError
from dovetail.jsonl import Row, append

METRICS = "metrics.jsonl"


LAST_SECONDS = 10.0  # for a logger to send what it has when the run ends


class Metrics:
    """On the first rank only."""

    def __init__(
        self, run_dir: Path, loggers: tuple[str, ...], config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._path = run_dir / METRICS
        self._say = say
        self._loggers = [LoggerThread(name, run_dir, config) for name in loggers]
        for logger in self._loggers:
            logger.start()

    def write(self, row: Row) -> None:
        """All of a row or nothing; non-finite numbers become null."""
        append(self._path, row)
        for logger in list(self._loggers):
            if logger.is_alive():
                logger.rows.put(row)
            else:
                self._say(f"the logger {logger.name} failed and gets no more; the run goes on ({logger.cause})")
                self._loggers.remove(logger)

    def close(self) -> None:
        for logger in self._loggers:
            logger.rows.put(None)
        for logger in self._loggers:
            logger.join(LAST_SECONDS)
            if logger.is_alive() or logger.cause:
                self._say(f"the logger {logger.name} may lack rows ({logger.cause or f'busy for {LAST_SECONDS:g} s'})")


class LoggerThread(threading.Thread):
    """Ends at None."""

    def __init__(self, kind: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        super().__init__(name=kind, daemon=True)
        self.run_dir, self.config = run_dir, config
        self.cause = ""  # of its failure
        self.rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()

    def run(self) -> None:
        with ExitStack() as stack:
            stack.push(self._note_failure)
            log, finish = (_wandb if self.name == "wandb" else _tensorboard)(self.run_dir, self.config)
            while (row := self.rows.get()) is not None:
                log({k: v for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)})
            finish()

    def _note_failure(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self.cause = "" if kind is None else f"{kind.__name__}: {error}"
        return True


def check_loggers(names: tuple[str, ...]) -> None:
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # without an origin: a mere folder, such as wandb leaves behind
            raise ConfigError(f"trainer.loggers names {name}, which is not installed: pip install 'dovetail[{name}]'")


def _wandb(run_dir: Path, config: Mapping[str, Any]) -> tuple[Callable[[Row], None], Callable[[], None]]:
    wandb = importlib.import_module("wandb")
    run = wandb.init(project="dovetail", name=run_dir.name, dir=str(run_dir), config=dict(config))
    return (lambda row: run.log(dict(row), step=row["step"])), run.finish


def _tensorboard(run_dir: Path, config: Mapping[str, Any]) -> tuple[Callable[[Row], None], Callable[[], None]]:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(run_dir / "tensorboard"))
    writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def log(row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, row["step"])
        writer.flush()

    return log, writer.close
