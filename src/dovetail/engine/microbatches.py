"""Micro-batches: made when they are first needed, and split for dual-batch overlap."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dovetail.batch.balancing import balanced_split
from dovetail.nn.model import StagedModel
from dovetail.parallel.mesh import Mesh

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """Items that `make(number)` makes when they are first read."""

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._numbers, self._make = range(count), make
        self._made: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]  # no slices
        number = self._numbers[index]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


MIN_HALF_TOKENS = 2048  # products of fewer lose more than their collectives cost


@dataclass(frozen=True)
class DualBatch:
    """Which micro-batches are split. min_tokens: of the smaller half; None: none are."""

    min_tokens: int | None

    @classmethod
    def of(cls, model: StagedModel, mesh: Mesh, enabled: bool | None) -> "DualBatch":
        """enabled: None: where it is faster (docs/performance.md)."""
        if enabled is None:
            pays = model.supports_dual_batch and mesh["tp"].size > 1 and mesh["ep"].size == 1
            return cls(MIN_HALF_TOKENS if pays and mesh.device.type != "cpu" else None)
        return cls(1 if enabled and model.supports_dual_batch else None)

    def should_split(self, lengths: Sequence[Sequence[int]], multiple: int = 1, budget: int | None = None) -> bool:
        """Given a micro-batch's sequence lengths in every replica, since ranks of ep exchange tokens once a half.

        multiple: to which each half is padded. budget: most tokens of both.
        """
        if self.min_tokens is None or min(map(len, lengths)) < 2:
            return False
        for replica in lengths:
            split = balanced_split(replica)
            halves = [sum(replica[:split]), sum(replica[split:])]
            padded = sum(-(-half // multiple) * multiple for half in halves)
            if min(halves) < self.min_tokens or (budget is not None and padded > budget):
                return False
        return True
