"""Continuous batching on the host, alike on every tp rank.

Admission allocates all pages that a sample may need.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.sampler.base import Numbers
from dovetail.sampler.kv_cache import PageBudget, PagePool
from dovetail.sampler.model_runner import ModelRunner

# Prompts wait until this share of the last batch is running, so that several are prefilled together.
ADMIT_BELOW = 0.75
StoreOutputs = Callable[[Numbers, Numbers, Numbers, NDArray[np.float64], NDArray[np.bool_]], None]


@dataclass(frozen=True, eq=False)
class Group:
    """Samples of one prompt.

    streams, slots: the noise of each, and its place in the output. drawn: how many of `ids` the
    samples drew before.
    """

    ids: Sequence[int]
    budget: PageBudget
    streams: Numbers
    slots: Numbers
    drawn: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass
class CachedPrompt:
    """A prompt with its pages. waiting: number of its samples that are not admitted yet."""

    group: Group
    pages: list[int]
    waiting: int


@dataclass(frozen=True)
class Request:
    """One running sample. copy: (from, to), for the partly filled page of its prompt."""

    group: Group
    sample: int
    pages: list[int]
    copy: tuple[int, int] | None


class Scheduler:
    """Waiting groups, in the order in which they were added, and the running samples.

    max_prefill_tokens: of prompts prefilled together.
    """

    def __init__(self, pool: PagePool, max_num_seqs: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting = deque[Group]()
        self.current: CachedPrompt | None = None  # partly admitted
        self.running = 0
        self._admitted = 0.0

    def add(self, group: Group) -> None:
        self.waiting.append(group)
        self._admitted = math.inf

    @property
    def should_admit(self) -> bool:
        return self.running <= ADMIT_BELOW * self._admitted

    @property
    def all_admitted(self) -> bool:
        return self.current is None and not self.waiting

    def admit(self) -> tuple[list[CachedPrompt], list[Request]]:
        """Returns prompts to prefill, and samples that run from now on, until there are none."""
        prompts: list[CachedPrompt] = []
        requests: list[Request] = []
        tokens = 0
        while self.running + len(requests) < self.max_num_seqs:
            if self.current is None:
                if not self.waiting:
                    break
                group = self.waiting[0]
                length = self.waiting[0].length
                full = bool(prompts) and tokens + length > self.max_prefill_tokens
                if full or group.budget.pages_for_first(length) > self.pool.num_free:
                    break
                pages = self.pool.allocate(group.budget.pages_for_prompt(length))
                self.current = CachedPrompt(self.waiting.popleft(), pages, group.budget.samples)
                prompts.append(self.current)
                tokens += length
            group = self.current.group
            last = self.current.waiting == 1
            if group.budget.pages_beyond_prompt(group.length, last=last) > self.pool.num_free:
                break
            requests.append(self._next_sample(self.current))
            if last:
                self.current = None
        self.running += len(requests)
        if not requests:
            self._admitted = self.running
        return prompts, requests

    def free(self, page_tables: list[list[int]]) -> None:
        """Frees the pages of finished samples."""
        for pages in page_tables:
            self.pool.free(pages)
        self.running -= len(page_tables)

    def clear(self) -> None:
        """Drops what waits."""
        if self.current is not None:
            self.pool.free(self.current.pages)
            self.current = None
        self.waiting.clear()

    def _next_sample(self, prompt: CachedPrompt) -> Request:
        budget = prompt.group.budget
        group = prompt.group
        sample = budget.samples - prompt.waiting
        full = group.length // budget.page_size
        last = prompt.waiting == 1
        prompt.waiting -= 1
        own = self.pool.allocate(budget.pages_beyond_prompt(group.length, last=last))
        if last:
            return Request(group, sample, prompt.pages + own, None)
        self.pool.share(prompt.pages[:full])
        copy = (prompt.pages[full], own[0]) if group.length % budget.page_size else None
        return Request(group, sample, prompt.pages[:full] + own, copy)


# Columns of a running row, which ends in its pages and zeros.
TOKEN, LENGTH, NUM_SAMPLED, STREAM, SLOT, MAX_TOKENS, PAGES = range(7)


def _new_rows(requests: Sequence[Request], table_width: int) -> Numbers:
    """Returns rows [n, PAGES + table_width] that lack the entry of their prompt's last token."""
    rows = np.zeros((len(requests), PAGES + table_width), np.int64)
    first = 0
    for group, own in groupby(requests, lambda request: request.group):
        samples = [request.sample for request in own]
        block = rows[first : first + len(samples)]
        block[:, LENGTH] = group.length - 1
        block[:, NUM_SAMPLED] = group.drawn
        block[:, STREAM] = group.streams[samples]
        block[:, SLOT] = group.slots[samples]
        block[:, MAX_TOKENS] = group.drawn + group.budget.new_tokens
        first += len(samples)
    for row, request in zip(rows, requests, strict=True):
        row[PAGES : PAGES + len(request.pages)] = request.pages
    return rows


class GenerationLoop:
    """The groups of a scheduler, with sampling parameters that are all alike but for their lengths.

    store: takes slots [n], tokens drawn before [n], new ones [n], ids and log-probs [steps, 2, n], and which are finished [n].
    experts: [slots, positions, M, K], of a runner that traces them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        stop_ids: Sequence[int],
        store: StoreOutputs,
        experts: Tensor | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.store = store
        self.experts = experts
        self.stop_ids = np.array(stop_ids, np.int64)
        self.rows = np.zeros((0, PAGES + runner.table_width), np.int64)
        self.finished = self.tokens = 0
        self._changed = True
        self._hidden: dict[Group, Tensor] = {}  # last hidden states of prompts with waiting samples

    @property
    def busy(self) -> bool:
        return len(self.rows) > 0 or not self.scheduler.all_admitted

    def step(self, *, admit: bool = True) -> bool:
        """Admits what may run, and decodes up to `decode_steps`. Returns False if nothing runs."""
        if admit and self.scheduler.should_admit:
            while self._admit(*self.scheduler.admit()):
                self._changed = True
        if not len(self.rows):
            return False
        left = int((self.rows[:, MAX_TOKENS] - self.rows[:, NUM_SAMPLED]).max())
        if self._changed:
            self.runner.set_rows(self.rows[:, :SLOT].T, self.rows[:, PAGES:])
        count = len(self.rows)
        outputs = self.runner.decode(count, min(self.runner.decode_steps, left))
        self.rows = self._accept(self.rows, outputs, self.runner.experts)
        self._changed = len(self.rows) < count
        return True

    def drop_except(self, slots: Container[int]) -> None:
        """Drops running samples of other slots, and waiting groups that have none of these."""
        kept = np.array([slot in slots for slot in self.rows[:, SLOT].tolist()], bool)
        self._free(self.rows[~kept])
        self._changed |= not kept.all()
        self.rows = self.rows[kept]
        groups = [
            group
            for group in self.scheduler.waiting
            if any(slot in slots for slot in group.slots.tolist())
        ]
        self.scheduler.waiting = deque(groups)

    def clear(self) -> None:
        """Drops all."""
        self._free(self.rows)
        self.rows = self.rows[:0]
        self._hidden = {}
        self._changed = True
        self.scheduler.clear()

    def grow_page_table(self, runner: ModelRunner) -> None:
        """Goes on with a runner of a wider page table and the same cache."""
        more = runner.table_width - self.runner.table_width
        self.runner = runner
        self.rows = np.pad(self.rows, ((0, 0), (0, more)))
        self._changed = True

    def _admit(self, prefilled: Sequence[CachedPrompt], requests: Sequence[Request]) -> bool:
        """Begins requests, and returns False if there are none."""
        if not requests:
            return False
        if prefilled:
            self._prefill(prefilled)
        copies = [request.copy for request in requests if request.copy is not None]
        self.runner.cache.copy_pages(copies)
        groups = list(dict.fromkeys(request.group for request in requests))
        hidden = torch.stack([self._hidden[group] for group in groups])
        places = {group: place for place, group in enumerate(groups)}
        rows = _new_rows(requests, self.runner.table_width)
        owners = [places[request.group] for request in requests]
        noise = rows[:, [STREAM, NUM_SAMPLED]].T
        outputs = self.runner.sample_first(hidden, owners, noise)
        unfinished = self._accept(rows, outputs)
        self.rows = np.concatenate((self.rows, unfinished))
        kept = {}
        if self.scheduler.current is not None:
            group = self.scheduler.current.group
            kept[group] = self._hidden[group]
        self._hidden = kept
        return True

    def _prefill(self, prompts: Sequence[CachedPrompt]) -> None:
        asked = [(prompt.group.ids, prompt.pages) for prompt in prompts]
        hidden, experts = self.runner.prefill(asked)
        for prompt, state in zip(prompts, hidden, strict=True):
            self._hidden[prompt.group] = state
        if experts is None or self.experts is None:
            return
        start = 0
        for group in (prompt.group for prompt in prompts):
            positions = torch.arange(group.length, device=experts.device)[None]
            slots = torch.from_numpy(group.slots).to(experts.device)[:, None]
            end = start + group.length
            self.experts[slots, positions] = experts[start:end].to(self.experts.dtype)
            start = end

    def _accept(
        self, rows: Numbers, outputs: NDArray[np.float64], experts: Tensor | None = None
    ) -> Numbers:
        """Stores outputs [steps, 2, n] and experts [steps, n, M, K] up to each row's end.

        Returns the unfinished rows.
        """
        ids = outputs[:, 0].astype(np.int64)
        steps = len(outputs)
        slots = rows[:, SLOT]
        drawn = rows[:, NUM_SAMPLED]
        stops = np.isin(ids, self.stop_ids)
        stopped = stops.any(0)
        until = np.where(stopped, stops.argmax(0) + 1, steps)
        taken = np.minimum(until, rows[:, MAX_TOKENS] - drawn)
        finished = stopped & (until == taken) | (drawn + taken == rows[:, MAX_TOKENS])
        self.store(slots, drawn, taken, outputs, finished)
        self.finished = self.finished + int(finished.sum())
        self.tokens = self.tokens + int(taken.sum())
        if experts is not None and self.experts is not None:
            step, row = np.nonzero(np.arange(steps)[:, None] < taken)
            target = (slots[row], rows[row, LENGTH] + step)
            to, at, steps_of, rows_of = (
                torch.from_numpy(indices).to(experts.device) for indices in (*target, step, row)
            )
            self.experts[to, at] = experts[steps_of, rows_of].to(self.experts.dtype)
        rows[:, TOKEN] = ids[-1]
        rows[:, LENGTH : NUM_SAMPLED + 1] += steps
        self._free(rows[finished])
        return rows[~finished]

    def _free(self, rows: Numbers) -> None:
        self.scheduler.free([pages[pages > 0].tolist() for pages in rows[:, PAGES:]])
