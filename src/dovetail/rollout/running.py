"""One call's samples from the first to the last: rows enter, run some steps, and leave as they end."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.rollout.base import Prompt, SamplingParams
from dovetail.rollout.deck import Deck, Numbers
from dovetail.rollout.found import Found
from dovetail.rollout.noise import streams
from dovetail.rollout.pages import Held, Row, Schedule

TOKEN, LENGTH, DRAWN = range(3)  # of `Running.numbers`, as `Deck.put` takes them


class Running:
    """The rows that run: numbers [4, n] and table [n, W] as `Deck.put` takes them, slots [n] in `found`, and their pages."""

    def __init__(self, new: int, stops: Sequence[int], width: int, found: Found) -> None:
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

    def join(self, other: "Running") -> None:
        """Put another's rows behind these."""
        self.numbers = np.concatenate((self.numbers, other.numbers), axis=1)
        self.table = np.concatenate((self.table, other.table))
        self.slots = np.concatenate((self.slots, other.slots))
        self.pages = self.pages + other.pages

    def add(self, rows: Sequence[Row], slots: Numbers, noise: Numbers) -> None:
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


class Generation:
    """One call of `sample` on one replica."""

    def __init__(
        self, deck: Deck, schedule: Schedule, prompts: Sequence[Prompt], params: SamplingParams, found: Found
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

    def _enter(self, computed: Sequence[Held], entered: Sequence[Row]) -> bool:
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

    def _compute(self, computed: Sequence[Held]) -> None:
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

    def _no_rows(self) -> Running:
        return Running(self.params.max_new_tokens, self.params.stop_ids, self.deck.size.width, self.found)
