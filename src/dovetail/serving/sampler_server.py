"""The embedded sampler in a process of its own: requests join and leave the running batch.

One thread owns the model. Others hand it work, which it does between two steps
(docs/adr/025-the-asynchronous-loop.md). An error of a request fails that request alone.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import Caught, CheckpointError, ConfigError, one_line
from dovetail.inference_servers.background import set_result_of
from dovetail.launch.process import complain
from dovetail.sampler.base import Numbers, SamplingParams
from dovetail.sampler.kv_cache import PagedCache, PagePool
from dovetail.sampler.model_runner import ModelRunner, pad_to_bucket
from dovetail.sampler.native import NativeSampler, Refilling
from dovetail.sampler.scheduler import GenerationLoop, Group, Scheduler
from dovetail.serving.receive import Receiver
from dovetail.serving.served_request import ServedRequest, ServedTokens, group_of

FIRST_VERSION = "default"  # of weights that no trainer pushed, in vLLM's words
BATCHES = 64  # names that are remembered: a request that is sent again does not wait for its batch
HOLD_SECONDS = 10.0  # until the requests of a batch begin without those that did not come
Deliver = Callable[[Sequence[tuple[ServedRequest, ServedTokens]]], None]
MAX_BYTES_PER_ELEMENT = 16  # of an element that is pushed, a tied copy included
KINDS = 16  # sets of sampling parameters that run at once: each has a runner with memory of its own


class SamplerServer:
    """Samples of any clients by one filled sampler.

    Other threads use `submit`, `abort` and `ask`; the rest through `call`.
    """

    def __init__(
        self,
        sampler: NativeSampler,
        max_length: int | None = None,
        utilization: float = 0.8,
        push_directory: Path | None = None,
    ) -> None:
        """max_length: of the model. utilization: share of a GPU's memory, for all we keep there.

        push_directory: the only one whose files may be pushed; None: no file may.
        """
        self.sampler = sampler
        self.options = sampler.options
        size = self.options.page_size
        pages = sampler.max_entries(utilization, of_all=True) // size
        longest = (pages - 1) * size  # one page is for the copy of a prompt's last page
        if longest < 1:
            raise ConfigError(
                f"the memory for keys and values has {pages} pages of {size} tokens, "
                "expected 2 or more; raise --gpu-memory-utilization"
            )
        self.cache = PagedCache(sampler.spec, sampler.mesh, sampler.dtype, pages + 1, size)
        self.pages = pages
        self.pool = PagePool(pages)
        self.max_length = longest if max_length is None else min(longest, max_length)
        self.version = FIRST_VERSION
        self.paused = False
        elements = sum(weight.numel() for weight in sampler.model.parameters())
        self.receiver = Receiver(
            sampler.mesh.device, push_directory, MAX_BYTES_PER_ELEMENT * elements
        )
        self._refilling: Refilling | None = None
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._loops: dict[SamplingParams, GenerationLoop] = {}
        self._slots = itertools.count()
        self._living: dict[int, ServedRequest] = {}  # by slot
        self._arrived = list[ServedRequest]()  # begin at the next step
        self._deferred: dict[SamplingParams, list[ServedRequest]] = {}  # KINDS others run
        self._held: dict[str, list[ServedRequest]] = {}  # wait for their batch
        self._begun = deque[str](maxlen=BATCHES)
        self._last_arrival = 0.0
        self._left = set[ServedRequest]()  # aborted since the last step
        self._events = list[tuple[ServedRequest, ServedTokens]]()  # of this step
        self._stopped = False

    @torch.no_grad()
    def run(self, deliver: Deliver) -> None:
        """Draws samples until `stop`: this thread owns the model. deliver: takes their events."""
        while not self._stopped:
            self._do_work()
            if not self.paused:
                self._step()
            if self._events:
                events = self._events
                self._events = []
                deliver(events)

    def stop(self) -> None:
        def end() -> None:
            self._stopped = True

        self._work.put(end)

    def submit(self, sample: ServedRequest) -> None:
        def arrive() -> None:
            with Caught() as caught:
                self._arrive(sample)
            if caught.error is not None:
                self._fail([sample], caught.error)

        self._work.put(arrive)

    def abort(self, sample: ServedRequest) -> None:
        self._work.put(lambda: self._left.add(sample))

    def ask(self, work: Callable[[], object]) -> Future[object]:
        """The work's result, which is computed between two steps unless the future is cancelled."""
        future: Future[object] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                set_result_of(future, work)

        self._work.put(answer)
        return future

    def call(self, work: Callable[[], object]) -> None:
        """Waits for `ask`. Raises what the work raises."""
        self.ask(work).result()

    def _step(self) -> None:
        """Runs one step of each set of sampling parameters."""
        for kind, loop in list(self._loops.items()):
            # two prompts that are partly admitted could wait for each other's pages
            others = (other for other in self._loops.values() if other is not loop)
            with Caught() as caught:
                loop.step(admit=not any(other.scheduler.current for other in others))
            if caught.error is not None:
                self._drop(kind, caught.error)
                return

    def _do_work(self) -> None:
        """Does what other threads asked for. Waits for it if nothing runs."""
        idle = self.paused or not (self._busy() or self._deferred)
        try:
            work = self._work.get(idle, HOLD_SECONDS if self._held else None)
            while True:
                work()
                work = self._work.get_nowait()
        except Empty:
            pass
        if self._held and time.monotonic() > self._last_arrival + HOLD_SECONDS:
            self._arrived += itertools.chain(*self._held.values())
            self._begun += self._held
            self._held = {}
        if self._left:
            self._remove_left()
        arrived = self._arrived
        self._arrived = []
        if arrived:
            self._begin(arrived)
        while self._deferred and len(self._busy()) < KINDS:
            kind = next(iter(self._deferred))
            self._begin(self._deferred.pop(kind))

    def _busy(self) -> list[SamplingParams]:
        return [kind for kind, loop in self._loops.items() if loop.busy]

    def _arrive(self, sample: ServedRequest) -> None:
        sample.slot = next(self._slots)
        self._living[sample.slot] = sample
        if sample.batch is None or sample.batch[0] in self._begun:
            self._arrived.append(sample)
            return
        name, count, _ = sample.batch
        held = self._held.setdefault(name, [])
        held.append(sample)
        self._last_arrival = time.monotonic()
        if len(held) == count:
            self._begun.append(name)
            del self._held[name]
            held.sort(key=lambda one: one.batch[2] if one.batch else 0)
            self._begin(held, together=True)

    def _remove_left(self) -> None:
        left = self._left
        self._left = set()
        for sample in left:
            self._living.pop(sample.slot, None)
        for waiting in (self._arrived, *self._deferred.values(), *self._held.values()):
            waiting[:] = [sample for sample in waiting if sample not in left]
        for loop in self._loops.values():
            loop.drop_except(self._living)

    def _begin(self, samples: Iterable[ServedRequest], *, together: bool = False) -> None:
        """Samples of a prompt that come at once share its pages.

        together: longest prompts first, as `NativeSampler`.
        """
        kinds: dict[SamplingParams, dict[object, list[ServedRequest]]] = {}
        for sample in samples:
            with Caught() as caught:
                prompts = kinds.setdefault(sample.kind, {})
                prompts.setdefault(sample.prompt, []).append(sample)
            if caught.error is not None:
                self._fail([sample], caught.error)
        for kind, prompts in kinds.items():
            busy = self._busy()
            if kind in busy or len(busy) < KINDS:
                self._begin_kind(kind, list(prompts.values()), together=together)
            else:
                deferred = self._deferred.setdefault(kind, [])
                deferred += itertools.chain(*prompts.values())

    def _begin_kind(
        self,
        kind: SamplingParams,
        prompts: Sequence[Sequence[ServedRequest]],
        *,
        together: bool,
    ) -> None:
        groups = list[Group]()
        begun = list[ServedRequest]()
        for members in prompts:
            with Caught() as caught:
                groups.append(group_of(members, self.options.page_size))
            if caught.error is None:
                begun += members
            else:
                self._fail(members, caught.error)
        if not groups:
            return
        if together:
            groups.sort(key=lambda group: -group.length)
        with Caught() as caught:
            loop = self._loop(kind, groups, exact=together)
        if caught.error is not None:
            self._fail(begun, caught.error)
            return
        for group in groups:
            loop.scheduler.add(group)

    def _drop(self, kind: SamplingParams, error: BaseException) -> None:
        """Fails the samples of a kind, whose step failed. All others are computed anew.

        The failed step may hold pages, so all loops are made anew over an empty pool.
        """
        if isinstance(error, torch.AcceleratorError):  # the device answers nothing more
            raise error
        waiting = self._waiting()
        begun = [sample for sample in self._living.values() if sample not in waiting]
        for loop in self._loops.values():
            loop.runner.drop_graphs()
        self._loops = {}
        self.pool = PagePool(self.pages)
        self._fail([sample for sample in begun if sample.kind == kind], error)
        self._begin([sample for sample in begun if sample.kind != kind])

    def _fail(self, samples: Sequence[ServedRequest], error: BaseException) -> None:
        text = one_line(error)
        complain(f"dovetail: note: {len(samples)} samples failed: {text}\n")
        for sample in samples:
            self._living.pop(sample.slot, None)
            self._events.append((sample, ServedTokens(error=text)))

    def _waiting(self) -> set[ServedRequest]:
        """Samples that have not begun."""
        lists = (self._arrived, *self._deferred.values(), *self._held.values())
        return set(itertools.chain(*lists))

    def _loop(
        self,
        kind: SamplingParams,
        groups: Sequence[Group],
        *,
        exact: bool,
    ) -> GenerationLoop:
        """The loop of a kind, with a page table that is wide enough for the groups.

        exact: if nothing runs, with the page table and the buckets of `NativeSampler`: both decide
        how sums are cut.
        """
        size = self.options.page_size
        slack = -(-self.sampler.decode_steps // size)  # finished rows run on
        width = slack + max(group.budget.pages_for_sample(group.length) for group in groups)
        loop = self._loops.get(kind)
        exact = exact and not (loop is not None and loop.busy)
        has = 0 if loop is None else loop.runner.table_width
        if loop is None or not (has == width or (has > width and not exact)):
            loop = self._new_loop(kind, loop, width, slack - (-self.max_length // size))
        loop.runner.joining = not exact
        return loop

    def _new_loop(
        self,
        kind: SamplingParams,
        loop: GenerationLoop | None,
        width: int,
        most: int,
    ) -> GenerationLoop:
        """Returns a new loop, or the one that runs with a wider page table."""
        if loop is not None and loop.busy:
            loop.runner.drop_graphs()
            wider = min(2 * loop.runner.table_width, most)
            loop.grow_page_table(self._runner(kind, max(width, wider)))
            return loop
        for other in [other for other, idle in self._loops.items() if not idle.busy]:
            self._loops.pop(other).runner.drop_graphs()
        options = self.options
        scheduler = Scheduler(self.pool, options.max_num_seqs, options.max_prefill_tokens)
        made = GenerationLoop(self._runner(kind, width), scheduler, kind.stop_ids, self._store)
        self._loops[kind] = made
        return made

    def _runner(self, kind: SamplingParams, width: int) -> ModelRunner:
        rows = pad_to_bucket(self.options.max_num_seqs)
        runner = self.sampler.make_runner(self.cache, rows, width)
        runner.set_params(kind)
        return runner

    def _store(
        self,
        slots: Numbers,
        _: Numbers,
        taken: Numbers,
        outputs: NDArray[np.float64],
        finished: NDArray[np.bool_],
    ) -> None:
        ids = outputs[:, 0].T.astype(np.int64).tolist()
        log_probs = outputs[:, 1].T.tolist()
        for row, slot in enumerate(slots.tolist()):
            sample = self._living.get(slot)
            if sample is None:  # its client left, and another sample of its prompt did not
                continue
            count = int(taken[row])
            ends = bool(finished[row])
            new = ids[row][:count]
            event = sample.draw(new, log_probs[row][:count], self.version, finished=ends)
            if event is not None:
                self._events.append((sample, event))
            if ends:
                del self._living[slot]

    def pause(self, *, clear_cache: bool) -> None:
        """Pauses. clear_cache: what runs is computed anew by the weights it goes on with."""
        self.paused = True
        if clear_cache:
            waiting = self._waiting()
            for loop in self._loops.values():
                loop.clear()
            self._begin([sample for sample in self._living.values() if sample not in waiting])

    def resume(self) -> None:
        if not self.sampler.filled:
            broken = "the weights are not whole: the last update was refused or left"
            raise ConfigError(f"{broken}; push again before /resume")
        self.paused = False

    def start_update(self) -> None:
        if not self.paused:
            problem = "weights change while generation is paused"
            raise ConfigError(f"{problem}: call /pause?mode=keep first")
        self.receiver.begin()
        self._refilling = Refilling(self.sampler)

    def update(self, info: Mapping[str, Any]) -> None:
        """A bucket or the manifest.

        A refusal ends the update: the server stays paused until another one is whole.
        """
        refilling = self._refilling
        self._refilling = None
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
        self._refilling = None
        self.version = version
