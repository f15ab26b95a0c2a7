"""Continuous batching on the host, alike on every tp rank. Admission allocates all pages that a sample may need."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.rollout.base import SampleBuffer, Watch
from dovetail.rollout.kv_cache import PageBudget, PagePool
from dovetail.rollout.model_runner import ModelRunner, Numbers
from dovetail.rollout.sampling import streams

ADMIT_BELOW = 0.75  # of the last batch is running: prompts wait until then, so that several are prefilled together


@dataclass
class CachedPrompt:
    """waiting: its samples that are not admitted yet."""

    index: int
    length: int
    pages: list[int]
    waiting: int


@dataclass(frozen=True)
class Request:
    """One running sample. copy: (from, to), for the partly filled page of its prompt."""

    prompt: int
    sample: int
    length: int  # of the prompt
    pages: list[int]
    copy: tuple[int, int] | None


class Scheduler:
    """Waiting prompts (index -> length), longest first, and the running samples.

    max_prefill_tokens: of prompts prefilled together.
    """

    def __init__(
        self, lengths: Mapping[int, int], budget: PageBudget, pool: PagePool, max_num_seqs: int, max_prefill_tokens: int
    ) -> None:
        self.lengths, self.budget, self.pool = lengths, budget, pool
        self.max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self.waiting = deque(sorted(lengths, key=lambda i: (-lengths[i], i)))
        self.current: CachedPrompt | None = None  # partly admitted
        self.running = 0
        self._admitted = 0

    @property
    def should_admit(self) -> bool:
        return self.running <= ADMIT_BELOW * self._admitted

    @property
    def all_admitted(self) -> bool:
        return self.current is None and not self.waiting

    def admit(self) -> tuple[list[CachedPrompt], list[Request]]:
        """Prompts to prefill, and samples that run from now on. Repeat until there are none."""
        prompts: list[CachedPrompt] = []
        requests: list[Request] = []
        tokens = 0
        while self.running + len(requests) < self.max_num_seqs:
            if self.current is None:
                length = self.lengths[self.waiting[0]] if self.waiting else 0
                full = bool(prompts) and tokens + length > self.max_prefill_tokens
                if not length or full or self.budget.pages_for_first(length) > self.pool.num_free:
                    break
                pages = self.pool.allocate(self.budget.pages_for_prompt(length))
                self.current = CachedPrompt(self.waiting.popleft(), length, pages, self.budget.samples)
                prompts.append(self.current)
                tokens += length
            last = self.current.waiting == 1
            if self.budget.pages_beyond_prompt(self.current.length, last=last) > self.pool.num_free:
                break
            requests.append(self._next_sample(self.current))
            if last:
                self.current = None
        self.running += len(requests)
        if not requests:
            self._admitted = self.running
        return prompts, requests

    def free(self, page_tables: list[list[int]]) -> None:
        """Of finished samples."""
        for pages in page_tables:
            self.pool.free(pages)
        self.running -= len(page_tables)

    def _next_sample(self, prompt: CachedPrompt) -> Request:
        sample, full = self.budget.samples - prompt.waiting, prompt.length // self.budget.page_size
        last = prompt.waiting == 1
        prompt.waiting -= 1
        own = self.pool.allocate(self.budget.pages_beyond_prompt(prompt.length, last=last))
        if last:
            return Request(prompt.index, sample, prompt.length, prompt.pages + own, None)
        self.pool.share(prompt.pages[:full])
        copy = (prompt.pages[full], own[0]) if prompt.length % self.budget.page_size else None
        return Request(prompt.index, sample, prompt.length, prompt.pages[:full] + own, copy)


TOKEN, LENGTH, DRAWN, STREAM, SLOT, PAGES = range(6)  # columns of a running row, which ends in its pages and zeros


def _new_rows(requests: Sequence[Request], slots: Numbers, noise: Numbers, table_width: int) -> Numbers:
    """Rows [n, PAGES + table_width] that lack the entry of their prompt's last token."""
    rows = np.zeros((len(requests), PAGES + table_width), np.int64)
    rows[:, STREAM], rows[:, SLOT] = noise, slots
    for row, request in zip(rows, requests, strict=True):
        row[LENGTH] = request.length - 1
        row[PAGES : PAGES + len(request.pages)] = request.pages
    return rows


class GenerationLoop:
    """One call of `sample` on one replica."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        buffer: SampleBuffer,
        watch: Watch | None = None,
    ) -> None:
        self.watch, self.finished, self.tokens = watch, 0, 0
        self.total = len(scheduler.lengths) * buffer.params.samples
        self.runner, self.scheduler, self.buffer = runner, scheduler, buffer
        self.prompts, self.params = buffer.prompts, buffer.params
        self.stop_ids = np.array(buffer.params.stop_ids, np.int64)
        self.rows = np.zeros((0, PAGES + runner.size.table_width), np.int64)
        self._hidden: dict[int, Tensor] = {}  # last hidden states of prompts with waiting samples

    def run(self) -> None:
        changed = True
        while True:
            if self.scheduler.should_admit:
                while self._admit(*self.scheduler.admit()):
                    changed = True
            if not len(self.rows):
                assert self.scheduler.all_admitted, "prompts wait, but nothing runs that could free pages for them"
                return
            left = self.params.max_new_tokens - int(self.rows[:, DRAWN].min())
            if changed:
                self.runner.set_rows(self.rows[:, :SLOT].T, self.rows[:, PAGES:])
            count = len(self.rows)
            outputs = self.runner.decode(count, min(self.runner.size.decode_steps, left))
            self.rows = self._accept(self.rows, outputs, self.runner.experts)
            if self.watch is not None:
                self.watch(self.finished, self.total, self.tokens)
            changed = len(self.rows) < count

    def _admit(self, prefilled: Sequence[CachedPrompt], requests: Sequence[Request]) -> bool:
        """False: there was nothing to admit."""
        if not requests:
            return False
        if prefilled:
            self._prefill(prefilled)
        self.runner.cache.copy_pages([request.copy for request in requests if request.copy is not None])
        owners = list(dict.fromkeys(request.prompt for request in requests))
        samples = np.array([request.sample for request in requests], np.int64)
        numbers = np.array([self.prompts[request.prompt].row for request in requests], np.int64)
        slots = np.array([request.prompt for request in requests], np.int64) * self.params.samples + samples
        noise = streams(self.params.seed, self.params.step, numbers, samples)
        hidden = torch.stack([self._hidden[prompt] for prompt in owners])
        places = {prompt: place for place, prompt in enumerate(owners)}
        outputs = self.runner.sample_first(hidden, [places[request.prompt] for request in requests], noise)
        rows = _new_rows(requests, slots, noise, self.runner.size.table_width)
        self.rows = np.concatenate((self.rows, self._accept(rows, outputs)))
        current = self.scheduler.current
        self._hidden = {} if current is None else {current.index: self._hidden[current.index]}
        return True

    def _prefill(self, prompts: Sequence[CachedPrompt]) -> None:
        hidden, experts = self.runner.prefill([(self.prompts[prompt.index].ids, prompt.pages) for prompt in prompts])
        self._hidden |= {prompt.index: state for prompt, state in zip(prompts, hidden, strict=True)}
        if experts is None:
            return
        samples = torch.arange(self.params.samples, device=experts.device)[:, None]
        start = 0
        for prompt in prompts:
            positions = torch.arange(prompt.length, device=experts.device)[None]
            slots = prompt.index * self.params.samples + samples
            self.buffer.experts[slots, positions] = experts[start : start + prompt.length].to(self.buffer.experts.dtype)
            start += prompt.length

    def _accept(self, rows: Numbers, outputs: NDArray[np.float64], experts: Tensor | None = None) -> Numbers:
        """Store outputs [steps, 2, n] and experts [steps, n, M, K] up to each row's end -> unfinished rows."""
        ids, steps, slots, drawn = outputs[:, 0].astype(np.int64), len(outputs), rows[:, SLOT], rows[:, DRAWN]
        stops = np.isin(ids, self.stop_ids)
        stopped = stops.any(0)
        until = np.where(stopped, stops.argmax(0) + 1, steps)
        taken = np.minimum(until, self.params.max_new_tokens - drawn)
        finished = stopped & (until == taken) | (drawn + taken == self.params.max_new_tokens)
        step, row = np.nonzero(np.arange(steps)[:, None] < taken)
        self.buffer.ids.numpy()[slots[row], drawn[row] + step] = ids[step, row]
        self.buffer.log_probs.numpy()[slots[row], drawn[row] + step] = outputs[step, 1, row]
        self.buffer.counts.numpy()[slots] += taken
        self.finished, self.tokens = self.finished + int(finished.sum()), self.tokens + int(taken.sum())
        if experts is not None:
            indices = (slots[row], rows[row, LENGTH] + step, step, row)
            slot_of, position, *source = (torch.from_numpy(x).to(experts.device) for x in indices)
            self.buffer.experts[slot_of, position] = experts[source[0], source[1]].to(self.buffer.experts.dtype)
        rows[:, TOKEN] = ids[-1]
        rows[:, LENGTH : DRAWN + 1] += steps
        self.scheduler.free([pages[pages > 0].tolist() for pages in rows[finished, PAGES:]])
        return rows[~finished]
