"""Decides which groups run and train when, so that no token is older than `max_lag` versions.

Group g is the samples of the g-th prompt. Version v is the policy after v steps. With B groups a
step, N = `max_lag`, and V the lowest version that servers sample with:

1. group g is admitted once g < (V + N + 1) B;
2. step t (from 0) takes groups B t to B t + B - 1, and waits until they are ready.

So g trains at step g // B <= V + N, with V of its admission, and steps have the rows of the
synchronous run (docs/adr/024-groups-train-in-order.md). Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class PromptGroup:
    """The samples of one prompt that are missing still, and whether they may train."""

    missing: int
    is_ready: bool = False


class StalenessController:
    """Admits groups by the rules above. It counts; others sample, save and train."""

    def __init__(self, groups_per_step: int, samples: int, max_lag: int, steps: int) -> None:
        self.groups_per_step = groups_per_step
        self.samples = samples
        self.max_lag = max_lag
        self.steps = steps
        self.version = 0
        self.step = 0
        self.groups: dict[int, PromptGroup] = {}  # admitted, not trained
        self._next = 0  # to admit

    @property
    def first(self) -> int:
        """The lowest group that is not trained."""
        return self.step * self.groups_per_step

    def admit(self) -> list[int]:
        """Returns the groups to begin, in order."""
        end = min(self.version + self.max_lag + 1, self.steps) * self.groups_per_step
        start = max(self._next, self.first)
        admitted = [group for group in range(start, end) if group not in self.groups]
        self.groups |= {group: PromptGroup(self.samples) for group in admitted}
        self._next = max(self._next, end)
        return admitted

    def finish(self, group: int) -> bool:
        """Counts a whole sample, and returns whether it was the group's last."""
        self.groups[group].missing -= 1
        return self.groups[group].missing == 0

    def ready(self, group: int) -> None:
        """Lets a group train, once it is saved."""
        self.groups[group].is_ready = True

    def missing_samples(self) -> int:
        """Returns the number of samples that the next step waits for."""
        groups = range(self.first, self.first + self.groups_per_step)
        return sum(self.groups[group].missing for group in groups)

    def take(self) -> list[int] | None:
        """Begins a step if all its groups are ready, and returns them."""
        chosen = list(range(self.first, self.first + self.groups_per_step))
        if not all(group in self.groups and self.groups[group].is_ready for group in chosen):
            return None
        for group in chosen:
            del self.groups[group]
        self.step += 1
        return chosen

    def pushed(self, version: int) -> None:
        """Notes that servers sample with `version` from now on."""
        assert self.version <= version <= self.step, (
            f"version {version} after {self.version}, of {self.step} steps"
        )
        self.version = version

    def restore(self, step: int, finished: Mapping[int, tuple[int, int]]) -> list[int]:
        """Goes on behind a checkpoint of `step`, and returns the finished groups that stay.

        finished: oldest and newest version by group. A group runs again if a step before its
        versions does, or if max_lag forbids it.
        """
        self.version = step
        self.step = step
        self._next = self.first
        missing = self.steps  # first step with a group that runs again
        for group in range(self.first, max(finished, default=-1) + 1):
            trains = group // self.groups_per_step
            oldest, newest = finished.get(group, (-1, self.steps))
            if group in finished and newest <= missing and trains - oldest <= self.max_lag:
                self.groups[group] = PromptGroup(0, is_ready=True)
            else:
                missing = min(missing, trains)
        return list(self.groups)
