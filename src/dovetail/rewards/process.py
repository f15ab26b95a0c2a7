"""The runner's side of a reward process. Imports no torch."""

import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from dovetail.jsonl import as_text
from dovetail.launch.process import start_worker
from dovetail.rewards.samples import RewardResult
from dovetail.rewards.worker import END_SECONDS, KILLED

MAX_ANSWER_BYTES = 1 << 20
MAX_BYTES_EACH = 1 << 12  # and for each sample


@dataclass(frozen=True)
class Answer:
    """Results of the samples of a message, and (name, value) of each metric that was logged."""

    results: list[RewardResult]
    metrics: list[tuple[str, float]]


class RewardProcess:
    """A reward in a process that can be killed, and its keeper; messages are JSON lines."""

    def __init__(self, setup: Mapping[str, Any], output: IO[bytes] | None) -> None:
        files = [] if output is None else [output.fileno()]
        self._process = start_worker("dovetail.rewards.worker", *map(str, files), files=files)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        self.answers = self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self._buffer = b""
        self._request_id = ""
        self.alive = True
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> None:
        self._request_id = secrets.token_hex()
        samples = sum(map(len, message.get("calls", ())))
        self._max_bytes = MAX_ANSWER_BYTES + MAX_BYTES_EACH * samples
        text = json.dumps({**message, "id": self._request_id}, default=as_text)
        left = text.encode() + b"\n"
        try:
            while left:
                left = left[os.write(self._requests.fileno(), left) :]
        except BrokenPipeError:
            self.alive = False

    def answer(self) -> Answer | None:
        """The answer to the last message, or None; does not wait."""
        try:
            chunk = os.read(self.answers.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        self.alive = self.alive and bool(chunk)
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline and len(line) < self._max_bytes:
            return None
        self._buffer = rest
        answer = _parsed(line, self._request_id)
        if answer is None:
            self.alive = False
            error = f"the reward wrote into the pipe that its answers go through: {line!r:.100}"
            return Answer([RewardResult(None, error)], [])
        return answer

    def ask_to_end(self) -> None:
        self._requests.close()

    def signal_of_its_end(self) -> int:
        """Returns the signal that killed the reward or its keeper, once their pipe is closed."""
        try:
            code = self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            return 0
        return -code if code < 0 else max(code - KILLED, 0)

    def kill(self) -> None:
        self.ask_to_end()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:  # the reward has stopped its keeper
            self._process.kill()
            self._process.wait()
        self.answers.close()


def _parsed(line: bytes, request_id: str) -> Answer | None:
    """None for what the worker cannot have written."""
    try:
        answer = json.loads(line)
        if answer["id"] != request_id:
            return None
        results = [RewardResult(**each) for each in answer["results"]]
        metrics = [(name, value) for name, value in answer["metrics"]]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return Answer(results, metrics)
