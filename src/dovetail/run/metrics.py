"""metrics.jsonl, samples and loggers. Writes wait in memory while the disk is full; loggers run in threads of their own."""

import errno
import importlib
import importlib.util
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save

from dovetail.batch.routing import RoutingTrace
from dovetail.errors import ConfigError
from dovetail.jsonl import ODD_LETTERS, Row, append, json_line

METRICS = "metrics.jsonl"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 64  # writes
LAST_SECONDS = 10.0  # for a logger to send what it has when the run ends

Write = Callable[[], object]  # writes everything; if it raises it is called again
Log = tuple[Callable[[Row], None], Callable[[], None]]  # a row, the end


class Records:
    """Writes in order, and again those that met a full disk."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: deque[Write] = deque()
        self._warned = False

    def write(self, write: Write) -> None:
        """Raises all errors but a full disk, and that if too many writes wait."""
        self._waiting.append(write)
        try:
            self.flush()
        except OSError as error:
            if error.errno not in DISK_FULL or len(self._waiting) > MOST_WAITING:
                raise
            if not self._warned:
                self._say(f"THE DISK IS FULL, the run goes on and keeps in memory what it has to write: {error}")
            self._warned = True

    def flush(self) -> None:
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()
        self._warned = False


def write_samples(path: Path, samples: Seq[Mapping[str, Any]]) -> None:
    """JSONL, and `routing` in a safetensors file of the same name."""
    with path.open("w", encoding="utf-8", errors=ODD_LETTERS) as out:
        for sample in samples:
            out.write(json_line({name: value for name, value in sample.items() if name != "routing"}))
    write_routes(path.with_suffix(".routing.safetensors"), [sample["routing"] for sample in samples])


def write_routes(path: Path, traces: Seq[RoutingTrace | None]) -> None:
    """indices [tokens, layers, K]; valid [tokens]; starts [samples + 1], offsets into tokens; layers: their numbers."""
    known = [trace for trace in traces if trace is not None]
    if not known:
        return
    whole = RoutingTrace.cat(known)
    last = int(whole.indices.max()) if whole.indices.numel() else 0
    narrow = torch.uint8 if last < 1 << 8 else torch.uint16 if last < 1 << 16 else torch.int32
    starts = torch.tensor([0, *map(len, known)]).cumsum(0)
    layers = torch.tensor(whole.layers)
    tensors = {"indices": whole.indices.to(narrow), "valid": whole.valid, "starts": starts, "layers": layers}
    path.write_bytes(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def read_routes(path: Path) -> list[RoutingTrace]:
    tensors = load_file(path)
    layers = tuple(tensors["layers"].tolist())
    return [
        RoutingTrace(layers, tensors["indices"][a:b].to(torch.int32), tensors["valid"][a:b])
        for a, b in pairwise(tensors["starts"].tolist())
    ]


class Metrics:
    """On the first rank only."""

    def __init__(self, run_dir: Path, loggers: Seq[str], config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._path, self._say = run_dir / METRICS, say
        self._loggers = [LoggerThread(name, run_dir, config) for name in loggers]
        for logger in self._loggers:
            logger.start()

    def write(self, row: Row) -> None:
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

    def _note_failure(self, kind: object, error: BaseException | None, _: TracebackType | None) -> bool:
        self.cause = "" if error is None else f"{type(error).__name__}: {error}"
        return True


def check_loggers(names: tuple[str, ...]) -> None:
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin: a mere folder, such as wandb leaves behind
            raise ConfigError(f"trainer.loggers names {name}, which is not installed: pip install 'dovetail[{name}]'")


def _wandb(run_dir: Path, config: Mapping[str, Any]) -> Log:
    wandb = importlib.import_module("wandb")
    run = wandb.init(project="dovetail", name=run_dir.name, dir=str(run_dir), config=dict(config))
    return (lambda row: run.log(dict(row), step=row["step"])), run.finish


def _tensorboard(run_dir: Path, config: Mapping[str, Any]) -> Log:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(run_dir / "tensorboard"))
    writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def log(row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, row["step"])
        writer.flush()

    return log, writer.close
