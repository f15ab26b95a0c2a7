"""An asynchronous run in one process: stand-ins of a trainer and of engines around the real pool, journal and feed.

A policy is a digest; a token depends on the policy that sampled it, its sample and its position, so that it shows whether the
run still has the policy of its version. A step of the trainer is a digest of what it trains on.
"""

import hashlib
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.rl.asynchronous.buffer import Feed
from dovetail.rl.asynchronous.checkpoint import Journal
from dovetail.rl.asynchronous.staleness import Pool
from dovetail.sampler.base import Completion
from dovetail.weights.atomic import replace_file

BATCH, SAMPLES, LAG, STEPS, SAVE_EVERY = 3, 2, 2, 12, 2
LENGTHS = (1, 2, 3, 5, 20)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def token(policy: str, group: int, sample: int, position: int) -> int:
    return int(digest(policy, group, sample, position)[:6], 16)


@dataclass
class Running:
    group: int
    sample: int
    length: int
    future: "Future[Completion]" = field(default_factory=Future)
    ids: tuple[int, ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()


class Engines:
    """Run at most four samples; a turn decodes up to three tokens of each."""

    def __init__(self, log: Path) -> None:
        self.waiting: list[Running] = []
        self.policy, self.version, self.log = "", 0, log
        self.luck, self.lock = random.Random(str(log)), threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, samples: Sequence[tuple[int, int]]) -> "list[Future[Completion]]":
        with open(self.log, "a") as log:
            log.writelines(f"{group}\n" for group, _ in samples)
        begun = [Running(*each, LENGTHS[int(digest(*each), 16) % len(LENGTHS)]) for each in samples]
        with self.lock:
            self.waiting += begun
        return [each.future for each in begun]

    def hold(self, policy: str, version: int) -> None:
        with self.lock:
            self.policy, self.version = policy, version

    def _run(self) -> None:
        while True:
            time.sleep(0.0002)
            with self.lock:
                done = [sampled for sampled in self.waiting[:4] if self._decode(sampled)]
                self.waiting = [sampled for sampled in self.waiting if sampled not in done]
            for each in done:
                each.future.set_result(
                    Completion(
                        0,
                        each.sample,
                        each.ids,
                        (-0.5,) * each.length,
                        "stop",
                        versions=each.versions,
                    )
                )

    def _decode(self, each: Running) -> bool:
        start = len(each.ids)
        stop = min(each.length, start + self.luck.randrange(4))
        each.ids += tuple(
            token(self.policy, each.group, each.sample, at) for at in range(start, stop)
        )
        each.versions += ((self.version, start, stop),) if stop > start else ()
        return stop == each.length


@dataclass
class Checkpoint:
    """policies: of every version. trained: groups of every step."""

    policies: list[str]
    trained: list[list[int]]

    @classmethod
    def load(cls, run: Path) -> "Checkpoint":
        path = run / "checkpoint.json"
        return (
            cls(**json.loads(path.read_text())) if path.exists() else cls([digest("initial")], [])
        )

    def save(self, run: Path) -> None:
        replace_file(run / "checkpoint.json", json.dumps(vars(self)).encode())


def train(run: Path, life: int) -> None:
    """To the end, from what an earlier start left in `run`. Checks every token that it trains on."""
    state, engines = Checkpoint.load(run), Engines(run / f"submitted-{life}")
    feed = Feed(Pool(BATCH, SAMPLES, LAG, STEPS), Journal(run / "pool", "key"), engines.submit)
    assert feed.resume(len(state.trained)) == []
    for step in range(len(state.trained), STEPS):
        engines.hold(state.policies[-1], step)
        feed.pushed(step)
        groups = feed.take()
        for group in groups:
            for answer in group.answers:
                at = [
                    state.policies[version]
                    for version, start, stop in answer.versions
                    for _ in range(start, stop)
                ]
                made = tuple(
                    token(policy, group.id, answer.sample, i) for i, policy in enumerate(at)
                )
                assert made == answer.ids, (
                    f"group {group.id} was sampled by policies that this run does not have"
                )
        time.sleep(0.001)  # engines go on while the trainer trains
        state.policies.append(
            digest(state.policies[-1], [answer.ids for group in groups for answer in group.answers])
        )
        state.trained.append([group.id for group in groups])
        if len(state.trained) % SAVE_EVERY == 0:
            state.save(run)
            feed.journal.forget(len(state.trained) * BATCH)
