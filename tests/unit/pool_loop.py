"""An asynchronous run in one process: stand-ins of a trainer and of engines around the real pool, journal and feed.

A policy is a digest; a token depends on the policy that sampled it, its sample and its position, so that it shows whether the
run still has the policy of its version. A step of the trainer is a digest of what it trains on.
"""

import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.rollout.feed import Feed, Request
from dovetail.rollout.journal import Answer, FinishedGroup, Journal
from dovetail.rollout.pool import Pool
from dovetail.weights.atomic import replace_file

BATCH, SAMPLES, LAG, STEPS, SAVE_EVERY = 3, 2, 2, 12, 2
LENGTHS = (1, 2, 3, 5, 20)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def token(policy: str, request: Request, position: int) -> int:
    return int(digest(policy, request.group, request.sample, position)[:6], 16)


@dataclass
class Running:
    request: Request
    length: int
    ids: tuple[int, ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()


class Engines:
    """Run at most four samples; a turn decodes up to three tokens of each."""

    def __init__(self, log: Path) -> None:
        self.waiting: list[Request] = []
        self.running: list[Running] = []
        self.policy, self.version, self.log = "", 0, log
        self.luck = random.Random(str(log))

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        with open(self.log, "a") as log:
            log.write(f"{request.group}\n")

    def collect(self, seconds: float) -> list[tuple[Request, Answer]]:
        time.sleep(seconds)
        while self.waiting and len(self.running) < 4:
            request = self.waiting.pop(0)
            self.running.append(
                Running(request, LENGTHS[int(digest(request.group, request.sample), 16) % len(LENGTHS)])
            )
        for sample in self.running:
            start = len(sample.ids)
            stop = min(sample.length, start + self.luck.randrange(4))
            sample.ids += tuple(token(self.policy, sample.request, at) for at in range(start, stop))
            sample.versions += ((self.version, start, stop),) if stop > start else ()
        done = [sample for sample in self.running if len(sample.ids) == sample.length]
        self.running = [sample for sample in self.running if sample not in done]
        return [(s.request, Answer(s.request.sample, s.ids, (-0.5,) * s.length, s.versions, "stop")) for s in done]


def reward(_: int, answers: Sequence[Answer]) -> list[Answer]:
    return [
        replace(answer, reward=float(sum(answer.ids) % 2), rewards={"odd": 1.0, "none": None}) for answer in answers
    ]


def keep(group: FinishedGroup) -> bool:
    """Every seventh has, as it were, equal rewards."""
    return group.id % 7 != 5


@dataclass
class Checkpoint:
    """policies: of every version. trained: groups of every step."""

    policies: list[str]
    trained: list[list[int]]
    cursor: int = 0

    @classmethod
    def load(cls, run: Path) -> "Checkpoint":
        path = run / "checkpoint.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls([digest("initial")], [])

    def save(self, run: Path) -> None:
        replace_file(run / "checkpoint.json", json.dumps(vars(self)).encode())


def train(run: Path, life: int) -> None:
    """To the end, from what an earlier start left in `run`. Checks every token that it trains on."""
    state, engines = Checkpoint.load(run), Engines(run / f"submitted-{life}")
    feed = Feed(Pool(BATCH, SAMPLES, LAG, STEPS), Journal(run / "pool", "key"), engines, reward, keep)
    assert feed.resume(len(state.trained), state.cursor) == []
    while len(state.trained) < STEPS:
        engines.policy, engines.version = state.policies[-1], len(state.trained)
        feed.pool.pushed(engines.version)
        feed.turn()
        while (groups := feed.take()) is None:
            feed.turn(0.0002)
        for group in groups:
            for answer in group.answers:
                request = Request(group.id, answer.sample, 0, 0)
                made = [
                    token(state.policies[v], request, at)
                    for v, start, stop in answer.versions
                    for at in range(start, stop)
                ]
                assert tuple(made) == answer.ids, (
                    f"group {group.id} was sampled by policies that this run does not have"
                )
        feed.turn()  # engines go on while the trainer trains
        state.policies.append(digest(state.policies[-1], [answer.ids for group in groups for answer in group.answers]))
        state.trained.append([group.id for group in groups])
        state.cursor = feed.pool.cursor
        if len(state.trained) % SAVE_EVERY == 0:
            state.save(run)
            feed.journal.forget(state.cursor)
