"""Packed batches. Entry i of `targets`, `mask` and fields belongs to the prediction made at position i."""

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.batch.packing import (
    LazyMedia as LazyMedia,
    Media as Media,
    Padding,
    Sequence as Sequence,
    columns_of,
    kind_of,
    padding_of,
    unpadded,
)
from dovetail.batch.routing import RoutingTrace
from dovetail.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    tokens: Tensor  # int64 [T], as targets
    positions: Tensor  # int64 [T], or [3, T] of images' times, rows and columns (`RopeSpec.rows`)
    cu_seqlens: Tensor  # int32 [S + 1]
    targets: Tensor
    mask: Tensor  # bool [T]
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # float32 or wider [T]; `temperature` divides the logits
    media: tuple[Media | None, ...] = ()  # by sequence, or empty, as groups
    routing: RoutingTrace | None = None  # to replay
    groups: tuple[int | None, ...] = ()
    padding: Padding | None = None  # of `from_padded`

    @classmethod
    def pack(
        cls,
        sequences: Iterable[Sequence | Seq[int] | Tensor],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> "PackedBatch":
        """Packs sequences in order. The last token of each has target 0 and mask False."""
        columns = columns_of(sequences, dtype)
        for name in ("media", "groups"):
            columns[name] = _or_empty(columns[name])
        cu_seqlens = cumulative(columns["lengths"])
        return cls(**columns, cu_seqlens=cu_seqlens)

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        *,
        fields: Mapping[str, Tensor] | None = None,
        groups: Seq[int | None] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "PackedBatch":
        """Packs rows [S, L] that are padded left or right.

        labels: unshifted, -100 is not counted. fields: entry j predicts token j.
        """
        padding, spans = padding_of(input_ids, attention_mask)
        rows = unpadded(input_ids, spans, labels, fields or {}, groups)
        batch = cls.pack(rows, dtype=dtype)
        return replace(batch, padding=padding)

    def unpack(self, values: Tensor, *, by_token: bool = False) -> Tensor | list[Tensor]:
        """values [T] by sequence: [S, L] of a batch `from_padded`, zeros in the padding, else a list of [n].

        Entry i belongs to the prediction at token i, as what `score` returns; by_token: to that of token i, as `labels`.
        """
        self._check_column("values", values)
        rows = list(values.split(self.lengths))
        if by_token:
            for i, row in enumerate(rows):
                first = torch.zeros_like(row[:1])
                rows[i] = torch.cat([first, row[:-1]])
        return rows if self.padding is None else self.padding.pad(rows)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """[T]"""
        ends = self.cu_seqlens
        counts = (ends[1:] - ends[:-1]).long()
        numbers = torch.arange(len(counts), device=counts.device)
        return torch.repeat_interleave(numbers, counts, output_size=len(self))

    @property
    def group_ids(self) -> Tensor:
        """int64 [S], -1 for none."""
        groups = self.groups or (None,) * self.num_sequences
        ids = [-1 if group is None else group for group in groups]
        numbers = torch.tensor(ids, dtype=torch.int64)
        return to_device(numbers, self.tokens.device)

    def with_fields(self, **fields: Tensor) -> "PackedBatch":
        for name, x in fields.items():
            self._check_column(f"field {name!r}", x)
        return replace(self, fields={**self.fields, **fields})

    def with_routing(self, routing: RoutingTrace | None) -> "PackedBatch":
        return replace(self, routing=routing)

    def with_mask(self, mask: Tensor) -> "PackedBatch":
        self._check_column("the mask", mask)
        if mask.dtype != torch.bool:
            raise DataError(f"the mask is {kind_of(mask)}; give torch.bool, as in mask > 0")
        return replace(self, mask=mask)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """Moves all but the media."""
        place = torch.device(device)
        transfer: Callable[..., Tensor] = to_device if non_blocking else Tensor.to
        move = partial(transfer, device=place)
        return self._map(move, cu_seqlens=move(self.cu_seqlens))

    def select(self, sequences: Seq[int]) -> "PackedBatch":
        lengths = tuple(self.lengths[s] for s in sequences)
        ends = [0, *accumulate(self.lengths)]
        spans = [slice(ends[s], ends[s + 1]) for s in sequences] or [slice(0, 0)]
        media = [self.media[s] for s in sequences] if self.media else []
        groups = [self.groups[s] for s in sequences] if self.groups else []
        cu_seqlens = cumulative(lengths)
        return self._map(
            lambda x: torch.cat([x[span] for span in spans]),
            cu_seqlens=cu_seqlens.to(self.cu_seqlens.device),
            lengths=lengths,
            media=_or_empty(media),
            groups=_or_empty(groups),
            padding=self.padding and self.padding.select(sequences),
        )

    def token_index(self, sequences: Seq[int]) -> Tensor:
        ends = [0, *accumulate(self.lengths)]
        spans = [torch.arange(ends[s], ends[s + 1]) for s in sequences]
        index = torch.cat(spans or [torch.arange(0)])
        return index.to(self.tokens.device)

    def compact(self, index: Tensor) -> "PackedBatch":
        """The tokens at sorted positions `index` [n], without media and routing; `lengths` stay."""
        ends = self.cu_seqlens.to(index.dtype)
        cu_seqlens = torch.searchsorted(index, ends, out_int32=True)
        without = replace(self, media=(), routing=None)
        return without._map(lambda x: x[index], cu_seqlens=cu_seqlens)

    def pad_to_multiple(self, multiple: int) -> "PackedBatch":
        missing = -len(self) % multiple if len(self) else multiple
        return self.padded(missing)

    def padded(self, missing: int) -> "PackedBatch":
        if not missing:
            return self
        more = (0, missing)
        fields = {}
        for name, x in self.fields.items():
            fill = 1.0 if name == "temperature" else 0.0
            fields[name] = F.pad(x, more, value=fill)
        lengths = (*self.lengths, missing)
        cu_seqlens = cumulative(lengths)
        positions = torch.arange(missing, device=self.positions.device)
        if self.positions.dim() > 1:
            positions = positions.expand(len(self.positions), missing)
        return replace(
            self,
            tokens=F.pad(self.tokens, more),
            targets=F.pad(self.targets, more),
            mask=F.pad(self.mask, more),
            positions=torch.cat([self.positions, positions], dim=-1),
            cu_seqlens=cu_seqlens.to(self.cu_seqlens.device),
            lengths=lengths,
            fields=fields,
            media=(*self.media, None) if self.media else (),
            routing=None if self.routing is None else self.routing.padded(missing),
            groups=(*self.groups, None) if self.groups else (),
            padding=None,
        )

    def _check_column(self, name: str, x: Tensor) -> None:
        if (
            not isinstance(x, Tensor)
            or x.shape != self.tokens.shape
            or x.device != self.tokens.device
        ):
            device = self.tokens.device
            wanted = f"a tensor [{len(self)}] on {device}, an entry for every token of the batch"
            raise DataError(f"{name} is {kind_of(x)}; expected {wanted} (dt.Sequence packs lists)")

    def _map(self, fn: Callable[[Tensor], Tensor], **by_sequence: Any) -> "PackedBatch":
        """Returns a batch with `fn` of all columns [T]."""
        if self.positions.dim() == 1:
            positions = fn(self.positions)
        else:
            positions = torch.stack([fn(row) for row in self.positions])
        return replace(
            self,
            tokens=fn(self.tokens),
            positions=positions,
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
    if on_host and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=on_host)


def cumulative(lengths: Seq[int]) -> Tensor:
    """int32 [S + 1]"""
    counts = torch.tensor([0, *lengths], dtype=torch.int64)
    return counts.cumsum(0).to(torch.int32)


def _or_empty(items: list[T | None]) -> tuple[T | None, ...]:
    if all(item is None for item in items):
        return ()
    return tuple(items)
