"""Engines, a trainer and a pool in simulated milliseconds: what GPUs yield under the rules of the real loop.

An engine decodes all its running samples at one pace, the slower the more there are; prefills and pushes stop it. The trainer
takes groups from a `StalenessController`, trains for a time that follows from their tokens, and pushes its weights.
Imports no torch.
"""

import heapq
import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

from dovetail.rl.asynchronous.staleness import StalenessController

DRAWN = 1000  # lengths of a log-normal distribution


@dataclass(frozen=True, kw_only=True)
class Setup:
    """decode: (running samples, tokens a second of one engine), rising in both.

    train_tokens_per_second: of prompts and responses, all passes of a step. max_running: samples of one engine.
    """

    engines: int
    max_running: int
    decode: Sequence[tuple[int, float]]
    prefill_tokens_per_second: float = inf
    train_tokens_per_second: float
    step_ms: float = 0.0  # of a step besides its tokens
    push_ms: float = 0.0
    groups_per_step: int
    samples: int
    prompt_tokens: int = 0
    max_lag: int
    steps: int = 12  # at least 2
    warmup: int = 4  # steps that are not counted


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation measured. Shares are of the time of the counted steps.

    lags: tokens by lag, of all steps. batches: groups of each step.
    """

    tokens_per_second: float  # of responses
    step_ms: float
    trainer_idle: float
    engine_idle: float
    lags: Mapping[int, int]
    batches: Sequence[Sequence[int]]

    @property
    def mean_lag(self) -> float:
        weighted = sum(lag * tokens for lag, tokens in self.lags.items())
        return weighted / max(1, sum(self.lags.values()))


def lognormal(mean: float, longest: int) -> list[int]:
    """Returns quantiles of a log-normal distribution: its mean, and `longest` as that of 99.9 %."""
    z = NormalDist().inv_cdf(1 - 1 / DRAWN)
    root = max(0.0, z * z - 2 * log(longest / mean))
    sigma = z - sqrt(root)
    mu = log(mean) - sigma * sigma / 2
    lengths = []
    for i in range(DRAWN):
        quantile = NormalDist().inv_cdf((i + 0.5) / DRAWN)
        length = round(exp(mu + sigma * quantile))
        lengths.append(min(longest, max(1, length)))
    return lengths


def token_ms(decode: Sequence[tuple[int, float]], running: int) -> float:
    """Returns the milliseconds of one token of every running sample.

    They are linear in the number of samples between the entries of `decode`, and beyond.
    """
    points = [(n, 1000 * n / speed) for n, speed in decode]
    fewest, fastest = points[0]
    if len(points) == 1 or running <= fewest:
        return fastest
    at = min(bisect_left(points, (running, 0.0)), len(points) - 1)
    low, before = points[at - 1]
    high, after = points[at]
    slope = (after - before) / (high - low)
    return before + slope * (running - low)


@dataclass
class SimulatedServer:
    """Samples that advance together. done: tokens that a sample has decoded which ran from the beginning.

    pushes: (done, version) of each; the first is (0, 0).
    """

    decode: Sequence[tuple[int, float]]
    now: float = 0.0
    done: float = 0.0
    stall: float = 0.0
    busy: float = 0.0
    running: list[tuple[float, float, int]] = field(
        default_factory=list
    )  # a heap of (done at its end, at its start, group)
    pushes: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    paces: dict[int, float] = field(default_factory=dict)

    @property
    def pace(self) -> float:
        """Milliseconds of a token."""
        count = len(self.running)
        if count not in self.paces:
            self.paces[count] = token_ms(self.decode, count)
        return self.paces[count]

    @property
    def next_end(self) -> float:
        if not self.running:
            return inf
        tokens = self.running[0][0] - self.done
        return self.now + self.stall + tokens * self.pace

    def advance(self, now: float) -> None:
        passed = now - self.now
        stalled = min(self.stall, passed)
        self.stall -= stalled
        if self.running:
            decoding = passed - stalled
            self.busy += decoding
            self.done += decoding / self.pace
        self.now = now

    def add(self, now: float, group: int, length: int, prefill_ms: float = 0.0) -> None:
        self.advance(now)
        self.stall += prefill_ms
        end = self.done + length
        heapq.heappush(self.running, (end, self.done, group))

    def end(self) -> tuple[int, list[tuple[int, int]]]:
        """Ends a sample at `next_end`. Returns its group, and (version, tokens) of its spans."""
        self.advance(self.next_end)
        self.done, start, group = heapq.heappop(self.running)
        first = bisect_left(self.pushes, (start, inf)) - 1
        marks = [(max(0, round(at - start)), version) for at, version in self.pushes[first:]]
        ends = [*(at for at, _ in marks[1:]), round(self.done - start)]
        spans = []
        for (at, version), stop in zip(marks, ends, strict=True):
            if stop > at:
                spans.append((version, stop - at))
        return group, spans

    def push(self, now: float, version: int, push_ms: float) -> None:
        self.advance(now)
        self.stall += push_ms
        self.pushes.append((self.done, version))


class Take(NamedTuple):
    """The beginning of a step. busy: milliseconds of all engines so far."""

    waiting_since: float
    begun: float
    tokens: int
    busy: float


class Simulation:
    """lengths: of responses, a list for each of some prompts, whose groups draw from it."""

    def __init__(self, setup: Setup, lengths: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.setup = setup
        self.lengths = lengths
        self.seed = seed
        beyond = setup.steps + setup.max_lag + 1  # so that the last steps are as the others
        self.pool = StalenessController(setup.groups_per_step, setup.samples, setup.max_lag, beyond)
        self.engines = [SimulatedServer(setup.decode) for _ in range(setup.engines)]
        self.queue = deque[tuple[int, int]]()  # samples that no engine has begun: group, length
        self.cached = set[tuple[int, int]]()  # engines and groups whose prompt they hold
        self.spans: dict[int, list[tuple[int, int]]] = {}
        self.lags = Counter[int]()
        self.batches: list[list[int]] = []
        self.takes: list[Take] = []
        self.now = 0.0

    def group_lengths(self, group: int) -> list[int]:
        draw = random.Random(f"{self.seed}/{group}")
        lengths = draw.choice(self.lengths)
        return draw.choices(lengths, k=self.setup.samples)

    def run(self) -> SimulationResult:
        setup = self.setup
        waiting_since = 0.0
        trained = inf
        pushed = inf
        self._feed()
        while True:
            ending = min(self.engines, key=lambda engine: engine.next_end)
            self.now = min(ending.next_end, trained, pushed)
            assert self.now < inf, "nothing runs, and the trainer waits"
            if self.now == pushed:
                pushed = inf
                waiting_since = self.now
                self.pool.pushed(self.pool.step)
                self._feed()
            elif self.now == trained:
                if self.pool.step == setup.steps:
                    break
                for engine in self.engines:
                    engine.push(self.now, self.pool.step, setup.push_ms)
                trained = inf
                pushed = self.now + setup.push_ms
                continue
            else:
                self._end(ending)
            if trained == pushed == inf and (batch := self.pool.take()) is not None:
                trained = self.now + self._begin(batch, waiting_since)
            if pushed == inf:  # engines are paused
                self._feed()
        return self._outcome()

    def _feed(self) -> None:
        for group in self.pool.admit():
            self.queue.extend((group, length) for length in self.group_lengths(group))
        while self.queue:
            busy = [len(engine.running) for engine in self.engines]
            index = busy.index(min(busy))
            engine = self.engines[index]
            if len(engine.running) >= self.setup.max_running:
                break
            group, length = self.queue.popleft()
            is_cached = (index, group) in self.cached
            prefill = 0 if is_cached else self.setup.prompt_tokens
            self.cached.add((index, group))
            prefill_ms = 1000 * prefill / self.setup.prefill_tokens_per_second
            engine.add(self.now, group, length, prefill_ms)

    def _end(self, engine: SimulatedServer) -> None:
        group, spans = engine.end()
        self.spans.setdefault(group, []).extend(spans)
        if self.pool.finish(group):
            self.pool.ready(group)

    def _begin(self, batch: Sequence[int], waiting_since: float) -> float:
        """Returns the milliseconds of the step."""
        setup = self.setup
        tokens = 0
        for group in batch:
            for version, count in self.spans.pop(group):
                self.lags[len(self.batches) - version] += count
                tokens += count
        for engine in self.engines:
            engine.advance(self.now)
        busy = sum(engine.busy for engine in self.engines)
        self.takes.append(Take(waiting_since, self.now, tokens, busy))
        self.batches.append(list(batch))
        prompts = len(batch) * setup.samples * setup.prompt_tokens
        train_ms = 1000 * (tokens + prompts) / setup.train_tokens_per_second
        return setup.step_ms + train_ms

    def _outcome(self) -> SimulationResult:
        """Measures from the beginning of the first counted step to that of the last."""
        warmup = min(self.setup.warmup, len(self.takes) - 2)
        counted = self.takes[warmup:]
        first = counted[0]
        last = counted[-1]
        spent = last.begun - first.begun
        tokens = sum(take.tokens for take in counted[:-1])
        waited = sum(take.begun - take.waiting_since for take in counted[1:])
        busy = (last.busy - first.busy) / (spent * self.setup.engines)
        return SimulationResult(
            tokens_per_second=1000 * tokens / spent,
            step_ms=spent / (len(counted) - 1),
            trainer_idle=waited / spent,
            engine_idle=max(0.0, 1 - busy),
            lags=dict(sorted(self.lags.items())),
            batches=self.batches,
        )
