"""A stand-in for a vLLM server with our plugin: a small transformers model, which takes weights by files between two tokens.

What it answers to a push is what `Pusher` reads; sums are checked by tests/unit/test_push.py, not here.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from tests.helpers.fake_engine import FakeEngine, Refused


@dataclass
class ModelEngine(FakeEngine):
    """push_seconds: of a bucket. refuses: versions that it fails to take; pushes: versions that it took.

    holds: whether a request of a seed waits before its next token; asked again after each push.
    """

    model: Path = field(kw_only=True)
    transfer: str | None = "dovetail_file"
    stream_interval: int | None = 1
    seconds: float = 0.0  # of a token
    holds: Callable[[int, int], bool] = field(default=lambda _seed, _length: False)
    push_seconds: float = 0.0
    refuses: Sequence[str] = ()
    pushes: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.brain: Any = AutoModelForCausalLM.from_pretrained(self.model).eval()
        self.vocabulary, self.logits = self.brain.config.vocab_size, self._logits
        self.turns, self.loading = threading.Condition(), dict[str, torch.Tensor]()
        return super().__enter__()

    @torch.no_grad()
    def _logits(self, ids: Sequence[int]) -> list[float]:
        scores: list[float] = self.brain(torch.tensor([list(ids)])).logits[0, -1].tolist()
        return scores

    def turn(
        self, ids: Sequence[int], params: dict[str, Any]
    ) -> tuple[str, list[float], list[float]]:
        time.sleep(self.seconds)
        with self.turns:
            self.turns.wait_for(
                lambda: not (self.paused or self.holds(params.get("seed", 0), len(ids)))
            )
            return super().turn(ids, params)

    def _vllm(self, path: str, body: Any) -> Any:
        if path == "/pause":
            with self.turns:
                self.paused = True
        elif path == "/resume":
            with self.turns:
                self.paused = False
                self.turns.notify_all()
        elif path == "/weight_info":
            return {"weight_version": self.version}
        elif path == "/get_world_size":
            return {"world_size": 1}
        elif path == "/update_weights":
            self._take(body["update_info"])
        elif path == "/finish_weight_update":
            if body["weight_version"] in self.refuses:
                raise Refused(500, "Call failed: these weights are refused")
            self.brain.load_state_dict(self.loading, strict=False)
            self.version = body["weight_version"]
            self.pushes.append(self.version)
        return super()._vllm(path, body)

    def _take(self, info: Any) -> None:
        if (
            "file" not in info
        ):  # the manifest behind the last bucket, or the end of an update that broke
            return
        time.sleep(self.push_seconds)
        data = Path(info["file"]).read_bytes()
        for name, dtype, shape, start, _ in info["tensors"]:
            kind = getattr(torch, dtype)
            count = torch.Size(shape).numel()
            self.loading[name] = torch.frombuffer(
                bytearray(data), dtype=kind, count=count, offset=start
            ).view(shape)
