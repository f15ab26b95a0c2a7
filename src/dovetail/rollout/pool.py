"""Which groups run and train when, so that no token is older than `max_lag` versions. A state machine; imports no torch.

A group is the samples of one prompt; its id is its place in the stream of rows. Version v is the policy after v steps; step t
(from 0) makes version t + 1. A token that version v sampled and step t trains on has the lag t - v. With B groups a step,
N = `max_lag`, and V the lowest version that engines sample with:

1. group g is admitted once g < (V + N + 1) B;
2. step t takes groups B t to B t + B - 1, and waits until they are ready.

The bound: group g trains at step g // B <= V + N, with V from when it was admitted, and no token of it is older: engines never go
back. Nothing starves and nothing is discarded: a step waits for its own groups alone, which are admitted at the latest when V is
the step's number, and each ends with its longest response. Which rows a step trains on depends on no clock: they are the rows of
the synchronous run, and with N = 0 every group is sampled by the version of its step.
docs/adr/024-groups-train-in-order.md compares other rules.
"""

from collections.abc import Mapping
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
        self.alive: dict[int, Group] = {}  # admitted and not trained
        self._next = 0  # to admit

    @property
    def first(self) -> int:
        """Lower groups are trained."""
        return self.step * self.groups_per_step

    def admit(self) -> list[int]:
        """Groups to run from now on, in this order."""
        end = min(self.version + self.max_lag + 1, self.steps) * self.groups_per_step
        admitted = [group for group in range(max(self._next, self.first), end) if group not in self.alive]
        self.alive |= {group: Group(self.samples) for group in admitted}
        self._next = max(self._next, end)
        return admitted

    def finish(self, group: int) -> bool:
        """One of its samples is complete; whether all are."""
        self.alive[group].left -= 1
        return self.alive[group].left == 0

    def ready(self, group: int) -> None:
        """It is saved, and may train."""
        self.alive[group].ready = True

    def take(self) -> list[int] | None:
        """Begin a step: its groups. None: it has to wait."""
        chosen = list(range(self.first, self.first + self.groups_per_step))
        if not all(group in self.alive and self.alive[group].ready for group in chosen):
            return None
        for group in chosen:
            del self.alive[group]
        self.step += 1
        return chosen

    def pushed(self, version: int) -> None:
        """All engines that sample hold `version`."""
        assert self.version <= version <= self.step, f"version {version} after {self.version}, of {self.step} steps"
        self.version = version

    def restore(self, step: int, finished: Mapping[int, tuple[int, int]]) -> list[int]:
        """Go on after the `step` of a checkpoint. Returns the finished groups that go on; the others run again.

        finished: by group the versions of its oldest and newest tokens. They train at the steps at which they would have, or
        did after the checkpoint: steps repeat, and versions mean the same policies. A finished group runs again if a step before
        one of its versions lacks a group (a damaged file), or if a smaller max_lag forbids it.
        """
        self.version = self.step = step
        self._next = self.first
        missing = self.steps  # the first step of which a group runs again
        for group in range(self.first, max(finished, default=-1) + 1):
            trains = group // self.groups_per_step
            oldest, newest = finished.get(group, (-1, self.steps))
            if group in finished and newest <= missing and trains - oldest <= self.max_lag:
                self.alive[group] = Group(0, ready=True)
            else:
                missing = min(missing, trains)
        return list(self.alive)
