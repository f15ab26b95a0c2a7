"""Which groups run and train when, so that no token is older than `max_lag` versions. Imports no torch.

Group g is the samples of the g-th prompt. Version v is the policy after v steps. With B groups a step, N = `max_lag`, and V the
lowest version that engines sample with:

1. group g is admitted once g < (V + N + 1) B;
2. step t (from 0) takes groups B t to B t + B - 1, and waits until they are ready.

So g trains at step g // B <= V + N, with V of its admission, and steps have the rows of the synchronous run
(docs/adr/024-groups-train-in-order.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Group:
    left: int  # samples
    ready: bool = False


class Pool:
    def __init__(self, groups_per_step: int, samples: int, max_lag: int, steps: int) -> None:
        self.groups_per_step = groups_per_step
        self.samples = samples
        self.max_lag = max_lag
        self.steps = steps
        self.version = self.step = 0
        self.alive: dict[int, Group] = {}  # admitted, not trained
        self._next = 0  # to admit

    @property
    def first(self) -> int:
        """The lowest group that is not trained."""
        return self.step * self.groups_per_step

    def admit(self) -> list[int]:
        """Groups to begin, in order."""
        end = min(self.version + self.max_lag + 1, self.steps) * self.groups_per_step
        admitted = [
            group for group in range(max(self._next, self.first), end) if group not in self.alive
        ]
        self.alive |= {group: Group(self.samples) for group in admitted}
        self._next = max(self._next, end)
        return admitted

    def finish(self, group: int) -> bool:
        """A sample is complete; returns whether it was the group's last."""
        self.alive[group].left -= 1
        return self.alive[group].left == 0

    def ready(self, group: int) -> None:
        """It is saved, and may train."""
        self.alive[group].ready = True

    def take(self) -> list[int] | None:
        """Begin a step: its groups, if they are ready."""
        chosen = list(range(self.first, self.first + self.groups_per_step))
        if not all(group in self.alive and self.alive[group].ready for group in chosen):
            return None
        for group in chosen:
            del self.alive[group]
        self.step += 1
        return chosen

    def pushed(self, version: int) -> None:
        assert self.version <= version <= self.step, (
            f"version {version} after {self.version}, of {self.step} steps"
        )
        self.version = version

    def restore(self, step: int, finished: Mapping[int, tuple[int, int]]) -> list[int]:
        """After a checkpoint of `step`. Returns the finished groups that stay; others run again.

        finished: oldest and newest version by group. It runs again if a step before its versions does, or if max_lag forbids it.
        """
        self.version = self.step = step
        self._next = self.first
        missing = self.steps  # first step with a group that runs again
        for group in range(self.first, max(finished, default=-1) + 1):
            trains = group // self.groups_per_step
            oldest, newest = finished.get(group, (-1, self.steps))
            if group in finished and newest <= missing and trains - oldest <= self.max_lag:
                self.alive[group] = Group(0, ready=True)
            else:
                missing = min(missing, trains)
        return list(self.alive)
