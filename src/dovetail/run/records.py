"""Writes of metrics, samples and events, which wait in memory while the disk is full."""

import errno
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from dovetail.batch.routing import RoutingTrace
from dovetail.jsonl import ODD_LETTERS, json_line

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 64  # writes

Write = Callable[[], object]  # writes everything; if it raises it is called again


class Records:
    """Performs writes in order and retries those that met a full disk."""

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
    """In the narrowest integer type; no file without routes.

    indices [tokens, layers, K]; valid [tokens]; starts [samples + 1], offsets into tokens; layers: their numbers.
    """
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
