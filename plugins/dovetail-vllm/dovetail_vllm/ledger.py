"""What an update must hold: the tensors of each bucket in turn, each once, with the announced dtypes, shapes and sums."""

import torch
from torch import Tensor

from dovetail_vllm.sums import checksums_of

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
SHOWN = 5  # names in a message


class Refused(ValueError):
    """This update is not what its trainer announced."""


class Ledger:
    def __init__(self) -> None:
        self.seen: dict[str, list] = {}  # name -> dtype, shape, sum
        self.buckets = 0
        self.whole = False

    def take(
        self, number: int, num_bytes: int, entries: list[list], memory: Tensor
    ) -> list[tuple[str, Tensor]]:
        """The tensors of bucket `number`, views of its memory (uint8), after all of them are checked.

        entries: name, dtype, shape, first byte, sum.
        """
        if not entries:
            raise Refused(f"bucket {number} is empty")
        first = entries[0][0]
        if number != self.buckets:
            kind = (
                "came twice"
                if number < self.buckets
                else f"came where bucket {self.buckets} was expected"
            )
            raise Refused(f"{first}: its bucket, number {number}, {kind}")
        if len(memory) != num_bytes:
            raise Refused(
                f"{first}: its bucket, number {number}, has {len(memory)} bytes, announced were {num_bytes}"
            )
        views = []
        for name, dtype, shape, start, _ in entries:
            if name in self.seen or name in (other for other, _ in views):
                raise Refused(f"{name}: came twice")
            views.append((name, _view(name, memory, dtype, shape, start)))
        for (name, dtype, shape, _, announced), found in zip(
            entries, checksums_of([view for _, view in views]), strict=True
        ):
            if found != announced:
                raise Refused(
                    f"{name}: its bytes have the sum {found}, announced was {announced}; nothing of its bucket was loaded"
                )
            self.seen[name] = [dtype, shape, found]
        self.buckets += 1
        return views

    def close(self, manifest: list[list]) -> None:
        """manifest: name, dtype, shape, sum of every tensor of the update."""
        announced = {name: [dtype, shape, number] for name, dtype, shape, number in manifest}
        if len(announced) != len(manifest):
            raise Refused("the manifest repeats a name")
        for problem, names in (
            ("missing", announced.keys() - self.seen.keys()),
            ("not announced", self.seen.keys() - announced.keys()),
            (
                "not as announced",
                {name for name, row in self.seen.items() if announced.get(name, row) != row},
            ),
        ):
            if names:
                raise Refused(f"{listed(names)}: {problem}")
        self.whole = True


def listed(names: set[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more


def _view(name: str, memory: Tensor, dtype: str, shape: list[int], start: int) -> Tensor:
    if dtype not in DTYPES:
        raise Refused(f"{name}: dtype {dtype!r}; known are {', '.join(DTYPES)}")
    kind, count = DTYPES[dtype], 1
    for length in shape:
        count *= length
    end = start + count * kind.itemsize
    if start < 0 or min(shape, default=0) < 0 or end > len(memory) or start % kind.itemsize:
        raise Refused(f"{name}: bytes {start} to {end} of a bucket of {len(memory)}")
    return memory[start:end].view(kind).view(shape)
