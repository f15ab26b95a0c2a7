"""Rows of files, and the rows of a step."""

import json
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from dovetail.errors import DataError, shortened
from dovetail.jsonl import RepeatedKeyError, unique_keys

MAX_DEPTH = 100
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes
BLOCK = 10_000  # rows of a mixture


@dataclass(frozen=True)
class JsonRow:
    values: Mapping[str, Any]
    path: Path
    line: int  # from 1; of tables and JSON arrays the row
    given: Mapping[str, Any] = field(default_factory=dict)  # values before the format's
    chat: bool = False  # a prompt that is a string becomes a user's message

    def error(self, message: str) -> DataError:
        return DataError(f"{self.path}:{self.line}: {message}")

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Adds file and line to a DataError."""
        try:
            yield
        except DataError as error:
            raise self.error(str(error)) from error

    def has(self, *names: str) -> bool:
        return all(self.values.get(name) is not None for name in names)

    def gives(self, name: str, instead_of: str) -> bool:
        """A null counts as missing if `instead_of` is there."""
        return name in self.values and (
            self.values[name] is not None or instead_of not in self.values
        )

    def id(self, index: int | str) -> Any:
        own = self.values.get("id")
        return index if own is None else own

    def require(self, *names: str, expected: str = "") -> None:
        """DataError if a name is missing. expected: what the rows are to have, where no recipe renames columns."""
        missing = [name for name in names if name not in self.values]
        if missing:
            lacks = ", ".join(map(repr, missing))
            has = shortened(", ".join(map(repr, self.given or self.values)) or "nothing")
            columns = f"data.columns={{{missing[0]}: COLUMN}}"
            edit = f"add the key to the row, rename a column, or set in a recipe {columns}"
            raise self.error(f"the row lacks {lacks} (it has {has}); {expected or edit}")


def is_deep(values: Any) -> bool:
    level = [values]
    depth = 0
    while level and depth <= MAX_DEPTH:
        inside = (
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
        )
        level = [item for item in inside if isinstance(item, dict | list)]
        depth = depth + 1
    return depth > MAX_DEPTH


def parse_json(text: bytes, place: str, kind: type = dict) -> Any:
    """A JSON object, or a list of them."""
    expected = (
        "each line must be one JSON object" if kind is dict else "expected a list of JSON objects"
    )
    deep = DataError(
        f"{place}: lists and objects inside each other more than {MAX_DEPTH} deep; make it flat"
    )
    try:
        values = json.loads(text.strip(), object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise deep from error
    except RepeatedKeyError as error:
        raise DataError(f"{place}: {error} in an object; keep one of the two") from error
    except ValueError as error:  # bad JSON, or bad UTF-8
        raise DataError(f"{place}: not JSON ({error}); {expected}") from error
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_deep(values):
        raise deep
    if not isinstance(values, kind):
        raise DataError(f"{place}: a {type(values).__name__}, not a JSON object such as {{...}}")
    if SURROGATE.search(text):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = f"{place}: half of a surrogate pair, which no text can hold; write the character itself"
            raise DataError(message) from error
    return values


def batch_rows(num_rows: int, count: int, seed: int | None, start: int) -> list[int]:
    """`count` rows from the `start`-th of endless epochs, shuffled unless `seed` is None."""
    stream = range(start, start + count)
    orders = {
        epoch: _epoch_order(num_rows, seed, epoch) for epoch in {at // num_rows for at in stream}
    }
    return [orders[at // num_rows][at % num_rows] for at in stream]


def mixed_rows(
    parts: Sequence[tuple[int, float]], count: int, seed: int | None, start: int
) -> list[int]:
    """As `batch_rows`, of concatenated parts: number of rows, and share of the stream."""
    firsts = [0, *accumulate(rows for rows, _ in parts)]
    shares = _block_shares(tuple(weight for _, weight in parts))
    rows = []
    for at in range(start, start + count):
        block, offset = divmod(at, BLOCK)
        order, places = _block_order(shares, seed or 0, block)
        part = order[offset]
        turn = block * shares[part] + bisect_left(places[part], offset)  # rows of this part so far
        (row,) = batch_rows(parts[part][0], 1, None if seed is None else seed + part, turn)
        rows.append(firsts[part] + row)
    return rows


def _block_shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Returns the rows of each part in a block, at least one."""
    ends = [round(BLOCK * end / sum(weights)) for end in accumulate(weights)]
    shares = [max(1, end - before) for before, end in zip([0, *ends], ends, strict=False)]
    shares[shares.index(max(shares))] -= sum(shares) - BLOCK
    return tuple(shares)


@lru_cache(maxsize=2)
def _block_order(
    shares: tuple[int, ...], seed: int, block: int
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """The part at each place of a block; the places of each part."""
    order = [part for part, share in enumerate(shares) for _ in range(share)]
    random.Random(f"{seed}/mixture/{block}").shuffle(order)
    return order, [
        [place for place, other in enumerate(order) if other == part] for part in range(len(shares))
    ]


@lru_cache(maxsize=32)  # a million rows take half a second
def _epoch_order(num_rows: int, seed: int | None, epoch: int) -> Sequence[int]:
    if seed is None:
        return range(num_rows)
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
