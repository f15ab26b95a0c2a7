"""Continuous batching on the host, alike on every tp rank. A sequence gets all pages that it may need when it is
admitted, so none is preempted."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.rollout.base import SampleBuffer
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
    """Waiting prompts (index -> length), longest first, and the running samples."""

    def __init__(
        self,
        lengths: Mapping[int, int],
        budget: PageBudget,
        pool: PagePool,
        max_num_seqs: int,
        max_prefill_tokens: int,
    ) -> None:
        """max_prefill_tokens: of prompts prefilled together; a longer one is alone."""
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
                if not length or (prompts and tokens + length > self.max_prefill_tokens):
                    break
                if self.budget.pages_for_first(length) > self.pool.num_free:
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
        """Samples with these pages have finished."""
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


TOKEN, LENGTH, DRAWN = range(3)  # of `RunningBatch.state`


class RunningBatch:
    """`ModelRunner.set_rows` takes its state [4, n] and page table; slots [n] are in the buffer. New samples lack their
    prompt's last entry."""

    def __init__(self, requests: Sequence[Request], slots: Numbers, noise: Numbers, width: int) -> None:
        lengths = np.array([request.length - 1 for request in requests], np.int64)
        zeros = np.zeros_like(lengths)
        self.state: Numbers = np.stack((zeros, lengths, zeros, noise))
        self.page_table: Numbers = np.zeros((len(requests), width), np.int64)
        for i, request in enumerate(requests):
            self.page_table[i, : len(request.pages)] = request.pages
        self.slots, self.pages = slots, [request.pages for request in requests]

    def __len__(self) -> int:
        return len(self.slots)

    def extend(self, other: "RunningBatch") -> None:
        self.state = np.concatenate((self.state, other.state), axis=1)
        self.page_table = np.concatenate((self.page_table, other.page_table))
        self.slots = np.concatenate((self.slots, other.slots))
        self.pages = self.pages + other.pages

    def drop(self, finished: NDArray[np.bool_]) -> list[list[int]]:
        """Remove finished samples: their pages."""
        freed = [pages for pages, over in zip(self.pages, finished, strict=True) if over]
        self.pages = [pages for pages, over in zip(self.pages, finished, strict=True) if not over]
        going = ~finished
        self.state, self.page_table, self.slots = self.state[:, going], self.page_table[going], self.slots[going]
        return freed


class GenerationLoop:
    """One call of `sample` on one replica."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, buffer: SampleBuffer) -> None:
        self.runner, self.scheduler, self.buffer = runner, scheduler, buffer
        self.prompts, self.params = buffer.prompts, buffer.params
        self.stop_ids = np.array(buffer.params.stop_ids, np.int64)
        none = np.zeros(0, np.int64)
        self.batch = RunningBatch((), none, none, runner.size.table_width)
        self._hidden: dict[int, Tensor] = {}  # last hidden states of prompts with waiting samples

    def run(self) -> None:
        changed = True
        while True:
            if self.scheduler.should_admit:
                while self._admit(*self.scheduler.admit()):
                    changed = True
            if not len(self.batch):
                assert self.scheduler.all_admitted, "prompts wait, but nothing runs that could free pages for them"
                return
            left = self.params.max_new_tokens - int(self.batch.state[DRAWN].min())
            steps = min(self.runner.size.decode_steps, left)
            if changed:
                self.runner.set_rows(self.batch.state, self.batch.page_table)
            outputs = self.runner.decode(len(self.batch), steps)
            freed = self._accept(self.batch, outputs, self.runner.experts)
            self.scheduler.free(freed)
            changed = bool(freed)

    def _admit(self, prefilled: Sequence[CachedPrompt], requests: Sequence[Request]) -> bool:
        """Prefill, draw first tokens, and add samples that go on; False: there were none."""
        if not requests:
            return False
        if prefilled:
            self._prefill(prefilled)
        self.runner.cache.copy_pages([request.copy for request in requests if request.copy is not None])
        owners = list(dict.fromkeys(request.prompt for request in requests))
        samples = np.array([request.sample for request in requests], np.int64)
        rows = np.array([self.prompts[request.prompt].row for request in requests], np.int64)
        slots = np.array([request.prompt for request in requests], np.int64) * self.params.samples + samples
        noise = streams(self.params.seed, self.params.step, rows, samples)
        hidden = torch.stack([self._hidden[prompt] for prompt in owners])
        places = {prompt: place for place, prompt in enumerate(owners)}
        batch = RunningBatch(requests, slots, noise, self.runner.size.table_width)
        outputs = self.runner.sample_first(hidden, [places[request.prompt] for request in requests], noise)
        self.scheduler.free(self._accept(batch, outputs))
        self.batch.extend(batch)
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
            self.buffer.put_experts(slots, positions, experts[start : start + prompt.length])
            start += prompt.length

    def _accept(
        self, batch: RunningBatch, outputs: NDArray[np.float64], experts: Tensor | None = None
    ) -> list[list[int]]:
        """Store ids and log-probs [steps, 2, n] of each row up to its end, and drop finished rows: their pages. experts
        [steps, n, M, K]."""
        ids, steps = outputs[:, 0].astype(np.int64), len(outputs)
        _, lengths, counts, _ = batch.state
        stops = np.isin(ids, self.stop_ids)
        stopped = stops.any(0)
        until = np.where(stopped, stops.argmax(0) + 1, steps)
        taken = np.minimum(until, self.params.max_new_tokens - counts)
        finished = stopped & (until == taken) | (counts + taken == self.params.max_new_tokens)
        step, row = np.nonzero(np.arange(steps)[:, None] < taken)
        slots, position = batch.slots[row], counts[row] + step
        self.buffer.ids.numpy()[slots, position] = ids[step, row]
        self.buffer.log_probs.numpy()[slots, position] = outputs[step, 1, row]
        self.buffer.counts.numpy()[batch.slots] += taken
        if experts is not None:
            indices = (torch.from_numpy(x).to(experts.device) for x in (slots, lengths[row] + step, step, row))
            slots_there, positions, step_there, row_there = indices
            self.buffer.put_experts(slots_there, positions, experts[step_there, row_there])
        batch.state[TOKEN] = ids[-1]
        batch.state[LENGTH : DRAWN + 1] += steps
        return batch.drop(finished)
