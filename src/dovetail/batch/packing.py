"""Sequences and padded rows to columns of a packed batch."""

from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dovetail.batch.routing import RoutingTrace, join_traces
from dovetail.errors import DataError

IGNORED = -100  # a label that is not counted

# A processor's output for one sequence: pixel_values, image_grid_thw, ...
Media = Mapping[str, Tensor]


class LazyMedia(Mapping[str, Tensor]):
    """Read at first access."""

    def start(self) -> None:
        """Begin to read, in the background."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sequence:
    """Entry j of `mask` and fields belongs to predicting ids[j]; a number as a field holds for all.

    Sequences of a `group` (0 or more) reach the loss in one micro-batch, in order.
    """

    ids: Seq[int]
    mask: Seq[bool] | None = None
    fields: Mapping[str, float | Seq[float]] = field(default_factory=dict)
    media: Media | None = None
    routing: RoutingTrace | None = None
    group: int | None = None


def columns_of(
    sequences: Iterable[Sequence | Seq[int] | Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of `PackedBatch` but `cu_seqlens`."""
    if hasattr(sequences, "ndim") or isinstance(sequences, Mapping):  # they may be padded
        raise DataError(
            f"pack got {kind_of(sequences)}; padded rows are for "
            "PackedBatch.from_padded(input_ids, attention_mask), and pack "
            "takes a list with the ids of each sequence, without padding, as in pack([row[:n] "
            "for row, n in zip(ids, lengths)])"
        )
    rows = []
    for i, row in enumerate(sequences):
        if isinstance(row, Sequence):
            rows.append(replace(row, ids=_ids(row.ids, i)))
        else:
            rows.append(Sequence(_ids(row, i)))
    lengths = tuple(len(row.ids) for row in rows)
    if not all(lengths):
        raise DataError(f"sequence {lengths.index(0)} has no tokens; a sequence needs at least one")
    names = sorted({name for row in rows for name in row.fields})
    tokens = [token for row in rows for token in row.ids]
    targets = [token for row in rows for token in (*row.ids[1:], 0)]
    mask: list[bool] = []
    columns: dict[str, list[float]] = {name: [] for name in names}
    for index, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        kept = [True] * n if row.mask is None else list(row.mask)
        if len(kept) != n:
            raise DataError(
                f"sequence {index} has {n} tokens but a mask of {len(kept)}; give one a token"
            )
        mask += [bool(m) for m in kept[1:]] + [False]
        for name in names:
            if name not in row.fields:
                raise DataError(f"sequence {index} has no field {name!r}; give it to all or none")
            columns[name] += _shifted(row.fields[name], n, name, index)
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        "positions": torch.tensor([p for n in lengths for p in range(n)], dtype=torch.int64),
        "targets": torch.tensor(targets, dtype=torch.int64),
        "mask": torch.tensor(mask, dtype=torch.bool),
        "lengths": lengths,
        "fields": {name: torch.tensor(column, dtype=dtype) for name, column in columns.items()},
        "media": [row.media for row in rows],
        "routing": join_traces([(len(row.ids), row.routing) for row in rows]),
        "groups": [_group(row.group, i) for i, row in enumerate(rows)],
    }


@dataclass(frozen=True)
class Padding:
    """Where the tokens of rows [S, width] begin and end."""

    width: int
    starts: tuple[int, ...]

    def select(self, rows: Seq[int]) -> "Padding":
        return Padding(self.width, tuple(self.starts[row] for row in rows))

    def pad(self, rows: Seq[Tensor]) -> Tensor:
        """Sequences [n] -> [S, width], with zeros in the padding."""
        whole = torch.zeros(len(rows), self.width, dtype=rows[0].dtype, device=rows[0].device)
        for out, start, row in zip(whole, self.starts, rows, strict=True):
            out[start : start + len(row)] = row
        return whole


def padding_of(input_ids: Tensor, attention_mask: Tensor) -> tuple[Padding, list[slice]]:
    """And where the tokens of each row are. DataError for a mask with a hole, or of padding alone."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise DataError(
            f"input_ids is {kind_of(input_ids)}; expected whole ids [sequences, tokens], with "
            "padding"
        )
    _check_shape("attention_mask", attention_mask, input_ids)
    spans = []
    for i, row in enumerate(attention_mask.tolist()):
        if any(value not in (0, 1) for value in row):
            raise DataError(
                f"attention_mask[{i}] has other values than 0 and 1; give 1 for tokens, 0 for "
                "padding"
            )
        start = row.index(1) if 1 in row else 0
        n = int(sum(row))
        if not n:
            raise DataError(f"attention_mask[{i}] is all 0; leave out rows that are padding alone")
        if 0 in row[start : start + n]:
            raise DataError(
                f"attention_mask[{i}] has a hole at {row.index(0, start)}; a sequence's tokens "
                "follow each other, with padding "
                "before or after them. Tokens that are read but not trained on are for labels: "
                "-100 there"
            )
        spans.append(slice(start, start + n))
    return Padding(input_ids.shape[1], tuple(span.start for span in spans)), spans


def unpadded(
    input_ids: Tensor,
    spans: Seq[slice],
    labels: Tensor | None,
    fields: Mapping[str, Tensor],
    groups: Seq[int | None] | None,
) -> list[Sequence]:
    if labels is not None:
        _check_shape("labels", labels, input_ids)
    for name, x in fields.items():
        _check_shape(f"field {name!r}", x, input_ids)
    if groups is not None and len(groups) != len(spans):
        raise DataError(
            f"groups has {len(groups)} entries; expected one for each of {len(spans)} rows"
        )
    rows = []
    for i, span in enumerate(spans):
        ids = input_ids[i, span]
        mask = None
        if labels is not None:
            mask = labels[i, span] != IGNORED
            if not torch.equal(labels[i, span][mask], ids[mask]):
                raise DataError(
                    f"labels[{i}] differs from input_ids[{i}]; a label is the token itself, at "
                    "its own position (unshifted), or "
                    "-100 where it is not counted"
                )
        columns = {name: x[i, span].tolist() for name, x in fields.items()}
        counted = None if mask is None else mask.tolist()
        group = None if groups is None else groups[i]
        rows.append(Sequence(ids.tolist(), counted, columns, group=group))
    return rows


def _check_shape(name: str, x: Any, like: Tensor) -> None:
    if not isinstance(x, Tensor) or x.shape != like.shape:
        raise DataError(
            f"{name} is {kind_of(x)}; expected a tensor {list(like.shape)}, as input_ids"
        )


def _group(group: object, index: int) -> int | None:
    if group is None:
        return None
    if not isinstance(group, Integral) or not 0 <= int(group) < 1 << 63:
        raise DataError(
            f"sequence {index} has the group {group!r}; give a whole number from 0 to 2**63 - 1, "
            "or None"
        )
    return int(group)


def _ids(row: Seq[int] | Tensor, index: int) -> list[int]:
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0, 0)
    if ids.dim() != 1 or (ids.numel() and ids.is_floating_point()):
        raise DataError(
            f"sequence {index} is {kind_of(row)}; give a list or a 1-D tensor of whole ids, as "
            "in pack([[1, 5, 7], [1, 9]])"
        )
    return ids.tolist()


def kind_of(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {x.dtype} on {x.device}"
    return f"a {type(x).__name__}"


def _shifted(values: float | Seq[float], n: int, name: str, index: int) -> list[float]:
    if isinstance(values, (int, float, Real)) or (isinstance(values, Tensor) and not values.dim()):
        return [float(values)] * n
    try:
        count = len(values)
        shifted = [*map(float, values[1:])]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sequence {index}: field {name!r} is {kind_of(values)} ({error}); give a number, or "
            f"one for each of {n} tokens"
        ) from error
    if count != n:
        raise DataError(f"sequence {index} has {n} tokens but {count} entries in field {name!r}")
    return [*shifted, 1.0 if name == "temperature" else 0.0]
