"""Items that are made when they are first asked for: the host makes a micro-batch while the device computes those before."""

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class OnDemand(Sequence[Item]):
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
