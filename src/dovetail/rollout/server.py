"""The embedded sampler in a process of its own: requests join and leave the running batch, pushes come between two turns.

One thread owns the model; others hand it work. `server_http.py` speaks to clients (docs/adr/025-the-asynchronous-loop.md).
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import CheckpointError, ConfigError
from dovetail.rollout.base import Numbers, SamplingParams
from dovetail.rollout.kv_cache import PageBudget, PagedCache, PagePool
from dovetail.rollout.model_runner import ModelRunner, pad_to_bucket
from dovetail.rollout.native import NativeSampler, Refilling
from dovetail.rollout.params import Finish
from dovetail.rollout.remote.background import settle
from dovetail.rollout.remote.receive import Receiver
from dovetail.rollout.sampling import streams
from dovetail.rollout.scheduler import GenerationLoop, Group, Scheduler

FIRST_VERSION = "default"  # of weights that no trainer pushed, in vLLM's words
BATCHES = 64  # names that are remembered: a request that is sent again does not wait for its batch
HOLD_SECONDS = 10.0  # without a request of a batch that is not whole: those that came begin


class Event(NamedTuple):
    """New tokens of a request; with its last ones how it ended, and all versions as (version, first token, behind the last)."""

    ids: list[int]
    log_probs: list[float]
    finish: Finish | None = None
    versions: Sequence[tuple[str, int, int]] = ()


@dataclass(eq=False, kw_only=True)
class Sample:
    """One request. drawn: how many of `ids` the sample drew before. batch: a name, its requests, and the number of this one.

    Requests of a batch begin together, as in one call of `NativeSampler.sample`. interval: tokens of an event.
    """

    ids: list[int]
    params: SamplingParams
    row: int
    sample: int
    drawn: int = 0
    batch: tuple[str, int, int] | None = None
    interval: int = 1
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)
    new: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    sent: int = 0

    def draw(self, ids: list[int], log_probs: list[float], version: str, *, finished: bool) -> None:
        start = len(self.new)
        if self.versions and self.versions[-1][0] == version:
            start = self.versions.pop()[1]
        self.new += ids
        self.log_probs += log_probs
        self.versions.append((version, start, len(self.new)))
        if finished or len(self.new) - self.sent >= self.interval:
            finish: Finish = "stop" if self.new[-1] in self.params.stop_ids else "length"
            new = self.new[self.sent :], self.log_probs[self.sent :]
            self.events.put(Event(*new, finish, self.versions) if finished else Event(*new))
            self.sent = len(self.new)


class SamplerServer:
    """Samples of any clients by one filled sampler. Other threads use `submit`, `abort`, and the rest through `call`."""

    def __init__(self, sampler: NativeSampler, max_length: int | None = None, utilization: float = 0.8) -> None:
        """max_length: of the model. utilization: share of a GPU's memory, for weights, keys and values."""
        self.sampler, self.options = sampler, sampler.options
        pages, size = sampler.max_entries(utilization, of_all=True) // self.options.page_size, self.options.page_size
        longest = (pages - 1) * size  # a prompt that several samples share may take a page more
        if longest < 1:
            room = f"{pages} pages of {size} tokens, expected 2 or more"
            raise ConfigError(f"the memory for keys and values has {room}; raise --gpu-memory-utilization")
        self.cache = PagedCache(sampler.spec, sampler.mesh, sampler.dtype, pages + 1, size)
        self.pool = PagePool(pages)
        self.max_length = longest if max_length is None else min(longest, max_length)
        self.version, self.paused = FIRST_VERSION, False
        self.receiver = Receiver(sampler.mesh.device)
        self._refilling: Refilling | None = None
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._loops: dict[SamplingParams, GenerationLoop] = {}
        self._slots = itertools.count()
        self._living: dict[int, Sample] = {}
        self._arrived = list[Sample]()
        self._held: dict[str, list[Sample]] = {}
        self._begun, self._heard = deque[str](maxlen=BATCHES), 0.0

    @torch.no_grad()
    def run(self) -> None:
        """Never returns: this thread owns the model."""
        while True:
            self._do_work()
            if self.paused:
                continue
            for loop in list(self._loops.values()):
                # a prompt that is partly admitted keeps pages: two of them could wait for each other
                others = (other.scheduler.current for other in self._loops.values() if other is not loop)
                loop.turn(admit=not any(others))

    def submit(self, sample: Sample) -> None:
        self._work.put(lambda: self._arrive(sample))

    def abort(self, sample: Sample) -> None:
        self._work.put(lambda: self._leave(sample))

    def call(self, work: Callable[[], object]) -> None:
        """Between two turns. Raises what it raises."""
        future: Future[object] = Future()
        self._work.put(lambda: settle(future, work))
        future.result()

    def _do_work(self) -> None:
        """What other threads asked for; waits for it if nothing runs."""
        idle = self.paused or not any(loop.busy for loop in self._loops.values())
        try:
            work = self._work.get(idle, HOLD_SECONDS if self._held else None)
            while True:
                work()
                work = self._work.get_nowait()
        except Empty:
            pass
        if self._held and time.monotonic() > self._heard + HOLD_SECONDS:
            self._arrived += itertools.chain(*self._held.values())
            self._begun += self._held
            self._held = {}
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._begin(arrived)

    def _arrive(self, sample: Sample) -> None:
        self._living[next(self._slots)] = sample
        if sample.batch is None or sample.batch[0] in self._begun:
            self._arrived.append(sample)
            return
        name, count, _ = sample.batch
        held = self._held.setdefault(name, [])
        held.append(sample)
        self._heard = time.monotonic()
        if len(held) == count:
            self._begun.append(name)
            del self._held[name]
            self._begin(sorted(held, key=lambda one: one.batch[2] if one.batch else 0), together=True)

    def _leave(self, sample: Sample) -> None:
        self._living = {slot: one for slot, one in self._living.items() if one is not sample}
        for waiting in (self._arrived, *self._held.values()):
            if sample in waiting:
                waiting.remove(sample)
        for loop in self._loops.values():
            loop.keep(self._living)

    def _begin(self, samples: Iterable[Sample], *, together: bool = False) -> None:
        """Samples of a prompt that come at once share its pages. together: longest prompts first, as `NativeSampler`."""
        slots = {sample: slot for slot, sample in self._living.items()}
        groups: dict[SamplingParams, dict[object, list[Sample]]] = {}
        for sample in samples:
            key = replace(sample.params, max_new_tokens=1, seed=0, step=0)
            prompt = (sample.params, sample.row, sample.drawn, *sample.ids, len(sample.new))
            groups.setdefault(key, {}).setdefault(sample if sample.new else prompt, []).append(sample)
        for key, prompts in groups.items():
            made = [self._group(members, [slots[member] for member in members]) for members in prompts.values()]
            if together:
                made.sort(key=lambda group: -group.length)
            loop = self._loop(key, made, exact=together)
            for group in made:
                loop.scheduler.add(group)

    def _group(self, members: list[Sample], slots: list[int]) -> Group:
        first, params = members[0], members[0].params
        samples = np.array([member.sample for member in members], np.int64)
        noise = streams(params.seed, params.step, np.full_like(samples, first.row), samples)
        budget = PageBudget(len(members), params.max_new_tokens - len(first.new), self.options.page_size)
        return Group([*first.ids, *first.new], budget, noise, np.array(slots, np.int64), first.drawn + len(first.new))

    def _loop(self, key: SamplingParams, groups: list[Group], *, exact: bool) -> GenerationLoop:
        """exact: if nothing runs, with the page table and the buckets of `NativeSampler`: both decide how sums are cut."""
        size = self.options.page_size
        slack = -(-self.sampler.decode_steps // size)  # finished rows run on
        width = slack + max(group.budget.pages_for_sample(group.length) for group in groups)
        loop = self._loops.get(key)
        exact = exact and not (loop is not None and loop.busy)
        has = 0 if loop is None else loop.runner.table_width
        if loop is None or not (has == width or (has > width and not exact)):
            loop = self._new_loop(key, loop, width, slack - (-self.max_length // size))
        loop.runner.joining = not exact
        return loop

    def _new_loop(self, key: SamplingParams, loop: GenerationLoop | None, width: int, most: int) -> GenerationLoop:
        """Or the one that runs, with a wider page table."""
        if loop is not None and loop.busy:
            loop.runner.drop_graphs()
            loop.widen(self._runner(key, max(width, min(2 * loop.runner.table_width, most))))
            return loop
        for other in [other for other, idle in self._loops.items() if not idle.busy]:
            self._loops.pop(other).runner.drop_graphs()
        scheduler = Scheduler(self.pool, self.options.max_num_seqs, self.options.max_prefill_tokens)
        self._loops[key] = GenerationLoop(self._runner(key, width), scheduler, key.stop_ids, self._store)
        return self._loops[key]

    def _runner(self, params: SamplingParams, width: int) -> ModelRunner:
        runner = self.sampler.make_runner(self.cache, pad_to_bucket(self.options.max_num_seqs), width)
        runner.set_params(params)
        return runner

    def _store(
        self, slots: Numbers, _: Numbers, taken: Numbers, outputs: NDArray[np.float64], finished: NDArray[np.bool_]
    ) -> None:
        drawn = outputs[:, 0].T.astype(np.int64).tolist(), outputs[:, 1].T.tolist()
        for slot, ids, log_probs, count, ends in zip(
            slots.tolist(), *drawn, taken.tolist(), finished.tolist(), strict=True
        ):
            sample = self._living.get(slot)
            if sample is None:  # its client left, and another sample of its prompt did not
                continue
            sample.draw(ids[:count], log_probs[:count], self.version, finished=ends)
            if ends:
                del self._living[slot]

    def pause(self, *, clear_cache: bool) -> None:
        """clear_cache: what runs is computed anew by the weights it goes on with."""
        self.paused = True
        if clear_cache:
            waiting = {*self._arrived, *itertools.chain(*self._held.values())}
            for loop in self._loops.values():
                loop.clear()
            self._begin([sample for sample in self._living.values() if sample not in waiting])

    def resume(self) -> None:
        if not self.sampler.filled:
            raise ConfigError(
                "the weights are not whole: the last update was refused or left; push again before /resume"
            )
        self.paused = False

    def start_update(self) -> None:
        if not self.paused:
            raise ConfigError("weights change while generation is paused: call /pause?mode=keep first")
        self.receiver.begin()
        self._refilling = Refilling(self.sampler)

    def update(self, info: Mapping[str, Any]) -> None:
        """A bucket or the manifest. A refusal ends the update: the server stays paused until another one is whole."""
        refilling, self._refilling = self._refilling, None
        if refilling is None or info.get("abort"):
            raise CheckpointError("no update is under way; call /start_weight_update first")
        if info.get("manifest") is None:
            for name, tensor in self.receiver.take(info):
                refilling.put(name, tensor)
        else:
            self.receiver.check(info["manifest"])
            refilling.finish()
        self._refilling = refilling

    def finish_update(self, version: str) -> None:
        if self._refilling is None or not self.sampler.filled:
            raise CheckpointError("the update ends without a manifest that it fulfils")
        self._refilling, self.version = None, version
