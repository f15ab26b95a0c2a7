"""An asynchronous run in one process: stand-ins of a trainer and of engines around the real rollout buffer.

A policy is a digest; a token depends on the policy that sampled it, its sample and its position, so that it shows whether the
run still has the policy of its version. A step of the trainer is a digest of what it trains on.
"""

import asyncio
import hashlib
import json
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.rl.asynchronous.buffer import RolloutBuffer
from dovetail.rl.asynchronous.checkpoint import RolloutCheckpoint
from dovetail.rl.asynchronous.staleness import StalenessController
from dovetail.sampler.params import SamplingParams
from dovetail.sampler.turn import GenerationRequest, RolloutId, Turn
from dovetail.weights.atomic import replace_file

BATCH, SAMPLES, LAG, STEPS, SAVE_EVERY = 3, 2, 2, 12, 2
LENGTHS = (1, 2, 3, 5, 20)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def token(policy: str, group: int, sample: int, position: int) -> int:
    return int(digest(policy, group, sample, position)[:6], 16)


@dataclass
class Running:
    id: RolloutId
    group: int
    sample: int
    length: int
    future: "Future[Turn]" = field(default_factory=Future)
    ids: tuple[int, ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()


def requests_of_step(
    step: int, groups: int = BATCH, samples: int = SAMPLES
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=RolloutId(step, row, sample), prompt_ids=(5, 6), params=SamplingParams()
        )
        for row in range(groups)
        for sample in range(samples)
    ]


class Engines:
    """Run at most four samples; a turn decodes up to three tokens of each."""

    def __init__(self, log: Path, groups_per_step: int = BATCH) -> None:
        self.groups_per_step = groups_per_step
        self.waiting: list[Running] = []
        self.policy, self.version, self.log = "", 0, log
        self.luck, self.lock = random.Random(str(log)), threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, request: GenerationRequest) -> Turn:
        step, row, sample = request.id
        group = step * self.groups_per_step + row
        with open(self.log, "a") as log:
            log.write(f"{group}\n")
        length = LENGTHS[int(digest(group, sample), 16) % len(LENGTHS)]
        running = Running(request.id, group, sample, length)
        with self.lock:
            self.waiting.append(running)
        return await asyncio.wrap_future(running.future)

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
                    Turn(
                        each.id,
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
    controller = StalenessController(BATCH, SAMPLES, LAG, STEPS)
    checkpoint = RolloutCheckpoint(run / "pool", "key")
    feed = RolloutBuffer(controller, checkpoint, engines, requests_of_step)
    assert feed.resume(len(state.trained)) == []
    for step in range(len(state.trained), STEPS):
        engines.hold(state.policies[-1], step)
        feed.pushed(step)
        turns = feed.take()
        groups = [turn.id.step * BATCH + turn.id.row for turn in turns]
        for group, turn in zip(groups, turns, strict=True):
            at = [
                state.policies[version]
                for version, start, stop in turn.versions
                for _ in range(start, stop)
            ]
            made = tuple(token(policy, group, turn.sample, i) for i, policy in enumerate(at))
            assert made == turn.ids, (
                f"group {group} was sampled by policies that this run does not have"
            )
        time.sleep(0.001)  # engines go on while the trainer trains
        state.policies.append(digest(state.policies[-1], [turn.ids for turn in turns]))
        state.trained.append([*dict.fromkeys(groups)])
        if len(state.trained) % SAVE_EVERY == 0:
            state.save(run)
            feed.forget(len(state.trained))
