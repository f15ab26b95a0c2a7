"""Which groups run and train when, so that no token is older than `max_lag` versions. A state machine; imports no torch.

A group is the samples of one prompt; its id is its place in the stream of rows. Version v is the policy after v steps; step t
(from 0) makes version t + 1. A token that version v sampled and step t trains on has the lag t - v. With B groups a step,
N = `max_lag`, V the lowest version that engines sample with, and S the next step:

1. at most (V + N + 1 - S) B groups are admitted and not trained;
2. a step takes the B lowest groups, and waits until they are ready.

The bound: by rule 2 a group with r lower ones (dropped ones do not count) trains at step r // B, or before it if lower ones are
dropped later. When it was admitted, r was below (V + N + 1) B, so its step is at most V + N, and no token of it is older than
V: engines never go back. Nothing starves and nothing is discarded: a step waits for admitted groups alone, each ends with its
longest response, and while V = S rule 1 leaves room for the B groups of the step. Which rows a step trains on depends on no
clock: they are the rows of the synchronous run, and with N = 0 every group is sampled by the version of its step.
docs/adr/024-groups-train-in-order.md compares other rules.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass
class Group:
    """left: samples that are not complete."""

    left: int
    ready: bool = False


class Pool:
    """samples: of a group; steps: of the run, beyond which nothing is admitted."""

    def __init__(self, groups_per_step: int, samples: int, max_lag: int, steps: int) -> None:
        self.groups_per_step, self.samples, self.max_lag, self.steps = groups_per_step, samples, max_lag, steps
        self.version = self.step = 0
        self.alive: dict[int, Group] = {}  # admitted, and neither trained nor dropped
        self.cursor = 0  # lower groups are trained or dropped. A checkpoint needs it and `step`
        self._next = 0  # to admit
        self._dropped = set[int]()  # of an earlier start

    def admit(self) -> list[int]:
        """Groups to run from now on, in this order."""
        room = (min(self.version + self.max_lag + 1, self.steps) - self.step) * self.groups_per_step - len(self.alive)
        admitted: list[int] = []
        self._next = max(self._next, self.cursor)
        while len(admitted) < room:
            if self._next not in self.alive and self._next not in self._dropped:
                self.alive[self._next] = Group(self.samples)
                admitted.append(self._next)
            self._next += 1
        return admitted

    def finish(self, group: int) -> bool:
        """One of its samples is complete; whether all are."""
        self.alive[group].left -= 1
        return self.alive[group].left == 0

    def ready(self, group: int) -> None:
        """It has its rewards and is saved: it may train."""
        self.alive[group].ready = True

    def drop(self, group: int) -> None:
        """It will not be trained: the next one takes its place."""
        del self.alive[group]

    def take(self) -> list[int] | None:
        """Begin a step: its groups. None: it has to wait."""
        chosen = sorted(self.alive)[: self.groups_per_step]
        if len(chosen) < self.groups_per_step or not all(self.alive[group].ready for group in chosen):
            return None
        for group in chosen:
            del self.alive[group]
        self.cursor = chosen[-1] + 1
        self.step += 1
        return chosen

    def pushed(self, version: int) -> None:
        """All engines that sample hold `version`."""
        assert self.version <= version <= self.step, f"version {version} after {self.version}, of {self.step} steps"
        self.version = version

    def restore(
        self, step: int, cursor: int, finished: Mapping[int, tuple[int, int]], dropped: Collection[int] = ()
    ) -> list[int]:
        """Go on after `step` from a checkpoint. Returns the finished groups that go on; the others run again.

        finished: by group the versions of its oldest and newest tokens. They train at the steps at which they would have, or
        did after the checkpoint: steps repeat, and versions mean the same policies. A finished group runs again if a step before
        one of its versions lacks a group (a damaged file), or if a smaller max_lag forbids it.
        """
        self.version = self.step = step
        self.cursor = self._next = cursor
        self._dropped = {group for group in dropped if group >= cursor}
        ids = range(cursor, max(finished, default=-1) + 1)
        missing = self.steps  # the first step of which a group runs again
        for rank, group in enumerate(group for group in ids if group not in self._dropped):
            trains = step + rank // self.groups_per_step
            oldest, newest = finished.get(group, (-1, self.steps))
            if newest <= missing and trains - oldest <= self.max_lag and group in finished:
                self.alive[group] = Group(0, ready=True)
            else:
                missing = min(missing, trains)
        return list(self.alive)
