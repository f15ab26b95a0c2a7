"""Which rows run, and on which pages of the cache: plain numbers, decided on the host alike on every rank of tp.

A row gets all the pages that it may come to need when it enters, so no row is ever thrown out. The full pages of a
prompt serve all its samples; what lies in a page that is not full is copied for each, except for the last to enter, which
takes over the prompt's own. Pages are free again as soon as nobody holds them, and prompts that wait enter then.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

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
class Held:
    """A prompt whose entries are in the cache, for as long as samples of it wait."""

    prompt: int
    length: int
    pages: list[int]
    left: int


@dataclass(frozen=True)
class Row:
    """One sample that runs. copied: (from, to), the pages of the prompt's last tokens, where it needs its own."""

    prompt: int
    sample: int
    length: int  # of the prompt
    pages: list[int]
    copied: tuple[int, int] | None


@dataclass(frozen=True)
class Need:
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
        self, lengths: Mapping[int, int], need: Need, pool: PagePool, *, most_rows: int, prefill_tokens: int
    ) -> None:
        """most_rows: that run at a time. prefill_tokens: of prompts that are computed together, or one longer prompt."""
        self.lengths, self.need, self.pool = lengths, need, pool
        self.most_rows, self.prefill_tokens = most_rows, prefill_tokens
        self.waiting = deque(sorted(lengths, key=lambda i: (-lengths[i], i)))
        self.current: Held | None = None  # the one prompt that some, not all samples of have entered
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

    def enter(self) -> tuple[list[Held], list[Row]]:
        """Prompts to compute now, and the rows that run from now on: of these, and of one computed before.

        To be called again until no more rows enter.
        """
        prompts: list[Held] = []
        rows: list[Row] = []
        tokens = 0
        while self.running + len(rows) < self.most_rows:
            if self.current is None:
                length = self.lengths[self.waiting[0]] if self.waiting else 0
                if not length or (prompts and tokens + length > self.prefill_tokens):
                    break
                if self.need.least(length) > self.pool.free:
                    break
                pages = self.pool.take(self.need.prompt(length))
                self.current = Held(self.waiting.popleft(), length, pages, self.need.samples)
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

    def _row(self, held: Held) -> Row:
        """The next sample of a prompt that is held."""
        sample, full = self.need.samples - held.left, held.length // self.need.page
        last = held.left == 1
        held.left -= 1
        own = self.pool.take(self.need.own(held.length, last=last))
        if last:
            return Row(held.prompt, sample, held.length, held.pages + own, None)
        self.pool.share(held.pages[:full])
        copied = (held.pages[full], own[0]) if held.length % self.need.page else None
        return Row(held.prompt, sample, held.length, held.pages[:full] + own, copied)
