"""Items that are made when they are first asked for: the host makes a micro-batch while the device computes those before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

from dovetail.batch.balancing import balanced_split
from dovetail.nn.decoder import Decoder
from dovetail.nn.model import StagedModel
from dovetail.parallel.mesh import Mesh

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """So many items, of which each is made once, by its number, and then kept."""

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._numbers, self._make = range(count), make
        self._made: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> list[Item]: ...
    def __getitem__(self, at: int | slice) -> Item | list[Item]:
        if isinstance(at, slice):
            return [self[i] for i in self._numbers[at]]
        number = self._numbers[at]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


LEAST = 2048  # tokens of a half: products of fewer lose more than their collectives cost


@dataclass(frozen=True)
class DualBatch:
    """least: tokens of the smaller half; None: no micro-batch is cut."""

    least: int | None

    @classmethod
    def of(cls, model: StagedModel, mesh: Mesh, in_turns: bool | None) -> "DualBatch":
        """in_turns: whether to cut at all, then whatever the size; None: on accelerators, where tp has collectives, and ep none.

        Experts over ep in turns were slower where they were measured: docs/performance.md.
        """
        if in_turns is None:
            pays = isinstance(model, Decoder) and mesh["tp"].size > 1 and mesh["ep"].size == 1
            return cls(LEAST if pays and mesh.device.type != "cpu" else None)
        return cls(1 if in_turns and isinstance(model, Decoder) else None)

    def cuts(self, lengths: Sequence[Sequence[int]], multiple: int = 1, budget: int | None = None) -> bool:
        """Whether a micro-batch is cut, given its sequences' lengths in every replica: ranks of ep are in several of them, and
        exchange tokens once for each half.

        multiple: of tokens, to which each half is padded. budget: most tokens of both.
        """
        return self.least is not None and all(self._cuts(each, multiple, budget) for each in lengths)

    def _cuts(self, lengths: Sequence[int], multiple: int, budget: int | None) -> bool:
        if len(lengths) < 2:
            return False
        cut = balanced_split(lengths)
        halves = [sum(lengths[:cut]), sum(lengths[cut:])]
        held = sum(-(-half // multiple) * multiple for half in halves)
        return self.least is not None and min(halves) >= self.least and (budget is None or held <= budget)
