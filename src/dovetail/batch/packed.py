"""Packed batches: tokens [T] with sequence boundaries, targets, a mask and per-token fields.

Entry i of `targets`, `mask` and fields belongs to the prediction made at position i, so no context-parallel rank needs its
neighbor's token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.batch.routing import RoutingTrace, join_traces
from dovetail.errors import DataError

T = TypeVar("T")

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # so that logits over a temperature stay finite and distinct

Media = Mapping[str, Tensor]  # a processor's output for one sequence: pixel_values, image_grid_thw, ...


class LazyMedia(Mapping[str, Tensor]):
    """Media that are read at first access."""

    def start(self) -> None:
        """Start reading in the background."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sequence:
    """A sequence before packing. Entry j of `mask` and fields belongs to predicting ids[j]; a number as a field holds for all.

    Sequences of one `group` (0 or more) reach the loss in one micro-batch, in order.
    """

    ids: Seq[int]
    mask: Seq[bool] | None = None
    fields: Mapping[str, float | Seq[float]] = field(default_factory=dict)
    media: Media | None = None
    routing: RoutingTrace | None = None
    group: int | None = None


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """tokens, positions, targets: int64 [T]; mask: bool [T]; cu_seqlens: int32 [S + 1]; lengths: the same on the host;
    fields: float32 (or wider) [T], of which `temperature` divides the logits. media, groups: by sequence, on the host, or
    empty. routing: experts to replay.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    targets: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    media: tuple[Media | None, ...] = ()
    routing: RoutingTrace | None = None
    groups: tuple[int | None, ...] = ()

    @classmethod
    def pack(
        cls, sequences: Iterable[Sequence | Seq[int] | Tensor], *, dtype: torch.dtype = torch.float32
    ) -> "PackedBatch":
        """Pack in order. The last token of each sequence has target 0 and mask False."""
        if hasattr(sequences, "ndim"):  # rows of a tensor or an array may have padding
            raise DataError(
                f"pack got {_kind(sequences)}; give a list with a 1-D tensor for each sequence, without its padding, as in "
                "pack([row[:n] for row, n in zip(ids, lengths)])"
            )
        rows = [
            replace(row, ids=_ids(row.ids, i)) if isinstance(row, Sequence) else Sequence(_ids(row, i))
            for i, row in enumerate(sequences)
        ]
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
                raise DataError(f"sequence {index} has {n} tokens but a mask of {len(kept)}; give one a token")
            mask += [bool(m) for m in kept[1:]] + [False]
            for name in names:
                if name not in row.fields:
                    raise DataError(f"sequence {index} has no field {name!r}; give it to all or none")
                columns[name] += _shifted(row.fields[name], n, name, index)
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            positions=torch.tensor([p for n in lengths for p in range(n)], dtype=torch.int64),
            cu_seqlens=cumulative(lengths),
            targets=torch.tensor(targets, dtype=torch.int64),
            mask=torch.tensor(mask, dtype=torch.bool),
            lengths=lengths,
            fields={name: torch.tensor(column, dtype=dtype) for name, column in columns.items()},
            media=_or_empty([row.media for row in rows]),
            routing=join_traces([(len(row.ids), row.routing) for row in rows]),
            groups=_or_empty([_group(row.group, i) for i, row in enumerate(rows)]),
        )

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """[T]: each token's sequence."""
        counts = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=len(self))

    @property
    def group_ids(self) -> Tensor:
        """int64 [S]: -1 for none. In a micro-batch a group's sequences follow each other."""
        ids = [-1 if group is None else group for group in self.groups or (None,) * self.num_sequences]
        return to_device(torch.tensor(ids, dtype=torch.int64), self.tokens.device)

    def with_fields(self, **fields: Tensor) -> "PackedBatch":
        for name, x in fields.items():
            self._check_column(f"field {name!r}", x)
        return replace(self, fields={**self.fields, **fields})

    def with_routing(self, routing: RoutingTrace | None) -> "PackedBatch":
        return replace(self, routing=routing)

    def with_mask(self, mask: Tensor) -> "PackedBatch":
        self._check_column("the mask", mask)
        if mask.dtype != torch.bool:
            raise DataError(f"the mask is {_kind(mask)}; give torch.bool, as in mask > 0")
        return replace(self, mask=mask)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """All but the media. non_blocking: as `to_device`."""
        place = torch.device(device)
        move = partial(to_device, device=place) if non_blocking else partial(torch.Tensor.to, device=place)
        return self._map(move, cu_seqlens=move(self.cu_seqlens))

    def select(self, sequences: Seq[int]) -> "PackedBatch":
        lengths, ends = tuple(self.lengths[s] for s in sequences), [0, *accumulate(self.lengths)]
        spans = [slice(ends[s], ends[s + 1]) for s in sequences] or [slice(0, 0)]
        return self._map(
            lambda x: torch.cat([x[span] for span in spans]),
            cu_seqlens=cumulative(lengths).to(self.cu_seqlens.device),
            lengths=lengths,
            media=_or_empty([self.media[s] for s in sequences]) if self.media else (),
            groups=_or_empty([self.groups[s] for s in sequences]) if self.groups else (),
        )

    def token_index(self, sequences: Seq[int]) -> Tensor:
        ends = [0, *accumulate(self.lengths)]
        spans = [torch.arange(ends[s], ends[s + 1]) for s in sequences]
        return torch.cat(spans or [torch.arange(0)]).to(self.tokens.device)

    def compact(self, index: Tensor) -> "PackedBatch":
        """The tokens at the sorted positions `index` [n], without media and routing. `lengths` stay those of all tokens."""
        cu_seqlens = torch.searchsorted(index, self.cu_seqlens.to(index.dtype), out_int32=True)
        return replace(self, media=(), routing=None)._map(lambda x: x[index], cu_seqlens=cu_seqlens)

    def pad_to_multiple(self, multiple: int) -> "PackedBatch":
        return self.padded(-len(self) % multiple if len(self) else multiple)

    def padded(self, missing: int) -> "PackedBatch":
        if not missing:
            return self
        names = ("tokens", "targets", "mask")
        padded = {name: torch.nn.functional.pad(getattr(self, name), (0, missing)) for name in names}
        positions = torch.cat([self.positions, torch.arange(missing, device=self.positions.device)])
        fill = {name: 1.0 if name == "temperature" else 0.0 for name in self.fields}
        fields = {n: torch.nn.functional.pad(x, (0, missing), value=fill[n]) for n, x in self.fields.items()}
        lengths = (*self.lengths, missing)
        return replace(
            self,
            **padded,
            positions=positions,
            cu_seqlens=cumulative(lengths).to(self.cu_seqlens.device),
            lengths=lengths,
            fields=fields,
            media=(*self.media, None) if self.media else (),
            routing=None if self.routing is None else self.routing.padded(missing),
            groups=(*self.groups, None) if self.groups else (),
        )

    def _check_column(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.shape != self.tokens.shape or x.device != self.tokens.device:
            expected = f"a tensor [{len(self)}] on {self.tokens.device}, an entry for every token of the batch"
            raise DataError(f"{name} is {_kind(x)}; expected {expected} (dt.Sequence packs lists)")

    def _map(self, fn: Callable[[Tensor], Tensor], **by_sequence: Any) -> "PackedBatch":
        """With `fn` of everything that has an entry a token."""
        return replace(
            self,
            tokens=fn(self.tokens),
            positions=fn(self.positions),
            targets=fn(self.targets),
            mask=fn(self.mask),
            fields={name: fn(x) for name, x in self.fields.items()},
            routing=None if self.routing is None else self.routing.map(fn),
            **by_sequence,
        )


def start_reading(media: Iterable[Media | None]) -> None:
    for item in media:
        if isinstance(item, LazyMedia):
            item.start()


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x.to(device)` without waiting for the device."""
    on_host = x.device.type == "cpu"
    return (x.pin_memory() if on_host and device.type == "cuda" else x).to(device, non_blocking=on_host)


def cumulative(lengths: Seq[int]) -> Tensor:
    """int32 [S + 1]: the start of each sequence, and T."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def _or_empty(items: list[T | None]) -> tuple[T | None, ...]:
    """Empty if no sequence has one."""
    return tuple(items) if any(item is not None for item in items) else ()


def _group(group: object, index: int) -> int | None:
    if group is None:
        return None
    if not isinstance(group, Integral) or not 0 <= int(group) < 1 << 63:
        raise DataError(f"sequence {index} has the group {group!r}; give a whole number from 0 to 2**63 - 1, or None")
    return int(group)


def _ids(row: Seq[int] | Tensor, index: int) -> list[int]:
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0, 0)
    if ids.dim() != 1 or (ids.numel() and ids.is_floating_point()):
        raise DataError(
            f"sequence {index} is {_kind(row)}; give a list or a 1-D tensor of whole ids, as in pack([[1, 5, 7], [1, 9]])"
        )
    return ids.tolist()


def _kind(x: object) -> str:
    return f"a tensor {list(x.shape)} of {x.dtype} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _shifted(values: float | Seq[float], n: int, name: str, index: int) -> list[float]:
    if isinstance(values, (int, float, Real)) or (isinstance(values, Tensor) and not values.dim()):
        return [float(values)] * n
    try:
        count, shifted = len(values), [*map(float, values[1:])]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sequence {index}: field {name!r} is {_kind(values)} ({error}); give a number, or one for each of {n} tokens"
        ) from error
    if count != n:
        raise DataError(f"sequence {index} has {n} tokens but {count} entries in field {name!r}")
    return [*shifted, 1.0 if name == "temperature" else 0.0]
