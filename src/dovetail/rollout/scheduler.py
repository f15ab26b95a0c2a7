"""Which rows run, and on which pages of the cache: plain numbers, decided on the host alike on every rank of tp.

A row gets all the pages that it may come to need when it enters, so no row is ever thrown out. The full pages of a
prompt serve all its samples; what lies in a page that is not full is copied for each, except for the last to enter, which
takes over the prompt's own. Pages are free again as soon as nobody holds them, and prompts that wait enter then.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.rollout.base import Prompt, SamplingParams
from dovetail.rollout.model_runner import ModelRunner, Numbers
from dovetail.rollout.noise import streams
from dovetail.rollout.results import SampleBuffer

# Share of the rows that went before: as long as more are going, prompts wait, so that several are computed together.
ENTER_BELOW = 0.75


class PagePool:
    """Pages 1 to `count` and how many hold each. Page 0 is nobody's: it takes what is written and never read."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._holders = [0] * (count + 1)

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` pages that nobody held."""
        assert n <= self.free, f"{n} pages wanted, {self.free} free"
        taken = [self._free.pop() for _ in range(n)]
        self.share(taken)
        return taken

    def share(self, pages: list[int]) -> None:
        """One more holder for each."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """One holder less for each."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was given back by nobody who held it"
            if not self._holders[page]:
                self._free.append(page)


@dataclass
class CachedPrompt:
    """A prompt whose entries are in the cache, for as long as samples of it wait."""

    prompt: int
    length: int
    pages: list[int]
    left: int


@dataclass(frozen=True)
class Request:
    """One sample that runs. copied: (from, to), the pages of the prompt's last tokens, where it needs its own."""

    prompt: int
    sample: int
    length: int  # of the prompt
    pages: list[int]
    copied: tuple[int, int] | None


@dataclass(frozen=True)
class PageBudget:
    """How many pages of how many entries `samples` rows of `new` tokens take, for prompts by their length."""

    samples: int
    new: int
    page: int

    def prompt(self, length: int) -> int:
        return -(-length // self.page)

    def row(self, length: int) -> int:
        """A row's whole table. The last token that is drawn gets no entry."""
        return max(self.prompt(length), -(-(length + self.new - 1) // self.page))

    def own(self, length: int, *, last: bool) -> int:
        """What a row takes beyond its prompt's pages."""
        return self.row(length) - (self.prompt(length) if last else length // self.page)

    def least(self, length: int) -> int:
        """What must be there for a prompt and one of its rows to run."""
        return self.prompt(length) + self.own(length, last=self.samples == 1)

    def all_rows(self, length: int) -> int:
        """A prompt and all its rows."""
        return self.prompt(length) + self.own(length, last=True) + (self.samples - 1) * self.own(length, last=False)


class Schedule:
    """Prompts that wait (number -> length), longest first, and the pages of those that run."""

    def __init__(
        self, lengths: Mapping[int, int], need: PageBudget, pool: PagePool, *, most_rows: int, prefill_tokens: int
    ) -> None:
        """most_rows: that run at a time. prefill_tokens: of prompts that are computed together, or one longer prompt."""
        self.lengths, self.need, self.pool = lengths, need, pool
        self.most_rows, self.prefill_tokens = most_rows, prefill_tokens
        self.waiting = deque(sorted(lengths, key=lambda i: (-lengths[i], i)))
        self.current: CachedPrompt | None = None  # the one prompt that some, not all samples of have entered
        self.running = 0
        self._ran = 0

    @property
    def ready(self) -> bool:
        """Whether so many rows left that prompts should enter."""
        return self.running <= ENTER_BELOW * self._ran

    @property
    def done(self) -> bool:
        """Whether every row has entered."""
        return self.current is None and not self.waiting

    def enter(self) -> tuple[list[CachedPrompt], list[Request]]:
        """Prompts to compute now, and the rows that run from now on: of these, and of one computed before.

        To be called again until no more rows enter.
        """
        prompts: list[CachedPrompt] = []
        rows: list[Request] = []
        tokens = 0
        while self.running + len(rows) < self.most_rows:
            if self.current is None:
                length = self.lengths[self.waiting[0]] if self.waiting else 0
                if not length or (prompts and tokens + length > self.prefill_tokens):
                    break
                if self.need.least(length) > self.pool.free:
                    break
                pages = self.pool.take(self.need.prompt(length))
                self.current = CachedPrompt(self.waiting.popleft(), length, pages, self.need.samples)
                prompts.append(self.current)
                tokens += length
            if self.need.own(self.current.length, last=self.current.left == 1) > self.pool.free:
                break
            rows.append(self._row(self.current))
            if not self.current.left:
                self.current = None
        self.running += len(rows)
        if not rows:
            self._ran = self.running
        return prompts, rows

    def leave(self, pages: list[list[int]]) -> None:
        """The rows with these pages have ended."""
        for each in pages:
            self.pool.give_back(each)
        self.running -= len(pages)

    def _row(self, held: CachedPrompt) -> Request:
        """The next sample of a prompt that is held."""
        sample, full = self.need.samples - held.left, held.length // self.need.page
        last = held.left == 1
        held.left -= 1
        own = self.pool.take(self.need.own(held.length, last=last))
        if last:
            return Request(held.prompt, sample, held.length, held.pages + own, None)
        self.pool.share(held.pages[:full])
        copied = (held.pages[full], own[0]) if held.length % self.need.page else None
        return Request(held.prompt, sample, held.length, held.pages[:full] + own, copied)


TOKEN, LENGTH, DRAWN = range(3)  # of `RunningBatch.numbers`, as `ModelRunner.put` takes them


class RunningBatch:
    """The running rows: numbers [4, n] and table [n, W] for `ModelRunner.put`, slots [n] in `found`, and their pages."""

    def __init__(self, new: int, stops: Sequence[int], width: int, found: SampleBuffer) -> None:
        self.new, self.stops, self.found = new, np.array(stops, np.int64), found
        self.numbers: Numbers = np.zeros((4, 0), np.int64)
        self.table: Numbers = np.zeros((0, width), np.int64)
        self.slots: Numbers = np.zeros(0, np.int64)
        self.pages: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def longest_left(self) -> int:
        """The most tokens that any row may still get."""
        return self.new - int(self.numbers[DRAWN].min())

    def join(self, other: "RunningBatch") -> None:
        """Put another's rows behind these."""
        self.numbers = np.concatenate((self.numbers, other.numbers), axis=1)
        self.table = np.concatenate((self.table, other.table))
        self.slots = np.concatenate((self.slots, other.slots))
        self.pages = self.pages + other.pages

    def add(self, rows: Sequence[Request], slots: Numbers, noise: Numbers) -> None:
        """Rows whose first token is not drawn yet, which is why they lack the entry of a prompt's last one."""
        count = len(rows)
        lengths = np.array([row.length - 1 for row in rows], np.int64)
        zeros = np.zeros_like(lengths)
        self.numbers = np.stack((zeros, lengths, zeros, noise))
        self.table = np.zeros((count, self.table.shape[1]), np.int64)
        for i, row in enumerate(rows):
            self.table[i, : len(row.pages)] = row.pages
        self.slots, self.pages = slots, [row.pages for row in rows]

    def accept(self, drawn: NDArray[np.float64], chosen: Tensor | None = None) -> list[list[int]]:
        """Note ids and log-probs [steps, 2, n], each row's up to its end, and drop rows that ended: their pages.

        chosen [steps, n, M, K]: the experts of the tokens that these steps took in.
        """
        ids, steps = drawn[:, 0].astype(np.int64), len(drawn)
        _, lengths, counts, _ = self.numbers
        stopped = np.isin(ids, self.stops)
        until = np.where(stopped.any(0), stopped.argmax(0) + 1, steps)  # steps up to a stop, and with it
        taken = np.minimum(until, self.new - counts)
        ended = stopped.any(0) & (until == taken) | (counts + taken == self.new)
        step, row = np.nonzero(np.arange(steps)[:, None] < taken)
        slots, at = self.slots[row], counts[row] + step
        self.found.ids.numpy()[slots, at] = ids[step, row]
        self.found.log_probs.numpy()[slots, at] = drawn[step, 1, row]
        self.found.counts.numpy()[self.slots] += taken
        if chosen is not None and self.found.routes is not None:
            indices = (torch.from_numpy(x).to(chosen.device) for x in (slots, lengths[row] + step, step, row))
            slots_there, positions, step_there, row_there = indices
            self.found.routes.put(slots_there, positions, chosen[step_there, row_there])
        self.numbers[TOKEN] = ids[-1]
        self.numbers[LENGTH : DRAWN + 1] += steps
        return self._keep(~ended)

    def _keep(self, going: NDArray[np.bool_]) -> list[list[int]]:
        """Drop all other rows: their pages."""
        gone = [pages for pages, stays in zip(self.pages, going, strict=True) if not stays]
        self.pages = [pages for pages, stays in zip(self.pages, going, strict=True) if stays]
        self.numbers, self.table, self.slots = self.numbers[:, going], self.table[going], self.slots[going]
        return gone


class GenerationLoop:
    """One call of `sample` on one replica."""

    def __init__(
        self,
        deck: ModelRunner,
        schedule: Schedule,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        found: SampleBuffer,
    ) -> None:
        self.deck, self.schedule, self.prompts, self.params, self.found = deck, schedule, prompts, params, found
        self.rows = self._no_rows()
        self._hidden: dict[int, Tensor] = {}  # by prompt with samples that wait: what their first tokens are drawn from

    def run(self) -> None:
        """Until every sample of every prompt has ended."""
        changed = True  # the rows, since they were put on the deck
        while True:
            if self.schedule.ready:
                while self._enter(*self.schedule.enter()):
                    changed = True
            if not len(self.rows):
                assert self.schedule.done, "prompts wait, and nothing runs that could make room for them"
                return
            steps = min(self.deck.size.ahead, self.rows.longest_left)
            if changed:
                self.deck.put(self.rows.numbers, self.rows.table)
            gone = self.rows.accept(self.deck.run(len(self.rows), steps), self.deck.chosen)
            self.schedule.leave(gone)
            changed = bool(gone)

    def _enter(self, computed: Sequence[CachedPrompt], entered: Sequence[Request]) -> bool:
        """Compute prompts, draw the first tokens of rows, and let those join that want more; False: there were none."""
        if not entered:
            return False
        if computed:
            self._compute(computed)
        self.deck.cache.copy([row.copied for row in entered if row.copied is not None])
        owners = list(dict.fromkeys(row.prompt for row in entered))
        samples = np.array([row.sample for row in entered], np.int64)
        numbers = np.array([self.prompts[row.prompt].row for row in entered], np.int64)
        slots = np.array([row.prompt for row in entered], np.int64) * self.params.samples + samples
        noise = streams(self.params.seed, self.params.step, numbers, samples)
        hidden = torch.stack([self._hidden[prompt] for prompt in owners])
        places = {prompt: place for place, prompt in enumerate(owners)}
        new = self._no_rows()
        new.add(entered, slots, noise)
        self.schedule.leave(new.accept(self.deck.first(hidden, [places[row.prompt] for row in entered], noise)))
        self.rows.join(new)
        current = self.schedule.current
        self._hidden = {} if current is None else {current.prompt: self._hidden[current.prompt]}
        return True

    def _compute(self, computed: Sequence[CachedPrompt]) -> None:
        """Prompts into the cache. Their experts are those of all their samples."""
        hidden, chosen = self.deck.fill([(self.prompts[held.prompt].ids, held.pages) for held in computed])
        self._hidden |= {held.prompt: state for held, state in zip(computed, hidden, strict=True)}
        if chosen is None or self.found.routes is None:
            return
        samples = torch.arange(self.params.samples, device=chosen.device)[:, None]
        at = 0
        for held in computed:
            positions = torch.arange(held.length, device=chosen.device)[None]
            slots = held.prompt * self.params.samples + samples
            self.found.routes.put(slots, positions, chosen[at : at + held.length])
            at += held.length

    def _no_rows(self) -> RunningBatch:
        return RunningBatch(self.params.max_new_tokens, self.params.stop_ids, self.deck.size.width, self.found)
