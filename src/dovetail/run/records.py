"""What a run writes down of its steps: rows, samples and events wait in memory while the disk is full.

A full disk must not end what hours of training have made: space may come back, and the last checkpoint is whole.
"""

import errno
from collections import deque
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

from dovetail.jsonl import ODD_LETTERS, json_line
from dovetail.rl.experience import Sample
from dovetail.rl.router_replay import write_routes

FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 64  # writes; samples are large, and who cannot write for so long may as well stop

Write = Callable[[], object]  # all of it or, where it raises, to be done again


class Records:
    """Does writes in their order. What finds the disk full is kept, and done first when there is more to write."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: deque[Write] = deque()
        self._told = False

    def write(self, *writes: Write) -> None:
        """Do what waits and then `writes`. Raises any error but that of a full disk, and that one when too much waits."""
        self._waiting.extend(writes)
        try:
            self.settle()
        except OSError as error:
            if error.errno not in FULL or len(self._waiting) > MOST_WAITING:
                raise
            if not self._told:
                self._say(f"THE DISK IS FULL, the run goes on and keeps in memory what it has to write: {error}")
            self._told = True

    def settle(self) -> None:
        """Do what waits; raises where that fails."""
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()
        self._told = False


def write_samples(path: Path, samples: Seq[Sample]) -> None:
    """A step's samples, one JSON object each, with the routes that they took beside them."""
    with path.open("w", encoding="utf-8", errors=ODD_LETTERS) as out:
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
    write_routes(path.with_suffix(".routing.safetensors"), [s.completion.routing for s in samples])
