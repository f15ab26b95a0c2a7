"""One sample that a server draws for a client, and the events that tell the client of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dovetail.sampler.base import SamplingParams
from dovetail.sampler.kv_cache import PageBudget
from dovetail.sampler.params import Finish
from dovetail.sampler.sampling import streams
from dovetail.sampler.scheduler import Group

Version = tuple[str, int, int]  # of the weights, the first token drawn by it, behind the last


class ServedTokens(NamedTuple):
    """New tokens of a sample. Its last event has `finish`, or `error` if the sample failed."""

    ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    finish: Finish | None = None
    versions: Sequence[Version] = ()  # of all tokens, with the last event
    error: str | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(eq=False, kw_only=True)
class ServedRequest:
    """A prompt with the tokens drawn so far.

    row, sample: keys of the noise. drawn: how many of `ids` the sample drew before, elsewhere.
    batch: a name, the number of its requests, and the place of this one among them. Requests of
    a batch begin together, as in one call of `NativeSampler.sample`. interval: tokens of an event.
    """

    ids: Sequence[int]
    params: SamplingParams
    row: int = 0
    sample: int = 0
    drawn: int = 0
    batch: tuple[str, int, int] | None = None
    interval: int = 1
    slot: int = -1  # the server's number of it
    new: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    sent: int = 0

    @property
    def kind(self) -> SamplingParams:
        """The parameters that samples of one running batch have in common."""
        return replace(self.params, max_new_tokens=1, seed=0, step=0)

    @property
    def prompt(self) -> object:
        """A key that is equal for samples that share the keys and values of a prompt."""
        if self.new:  # it runs anew, behind tokens of its own
            return self
        return (self.params, self.row, self.drawn, *self.ids)

    def draw(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        version: str,
        *,
        finished: bool,
    ) -> ServedTokens | None:
        """Appends tokens. Returns an event if the sample is finished or an interval is full."""
        start = len(self.new)
        if self.versions and self.versions[-1][0] == version:
            start = self.versions.pop()[1]
        self.new += ids
        self.log_probs += log_probs
        self.versions.append((version, start, len(self.new)))
        if not finished and len(self.new) - self.sent < self.interval:
            return None
        sent, self.sent = self.sent, len(self.new)
        event = ServedTokens(self.new[sent:], self.log_probs[sent:])
        if not finished:
            return event
        stopped = self.new[-1] in self.params.stop_ids
        return event._replace(finish="stop" if stopped else "length", versions=self.versions)


def group_of(members: Sequence[ServedRequest], page_size: int) -> Group:
    """The scheduler's group of samples with equal `prompt`."""
    first = members[0]
    params = first.params
    rows = np.array([member.row for member in members], np.int64)
    samples = np.array([member.sample for member in members], np.int64)
    slots = np.array([member.slot for member in members], np.int64)
    noise = streams(params.seed, params.step, rows, samples)
    budget = PageBudget(len(members), params.max_new_tokens - len(first.new), page_size)
    ids = [*first.ids, *first.new]
    return Group(ids, budget, noise, slots, first.drawn + len(first.new))
