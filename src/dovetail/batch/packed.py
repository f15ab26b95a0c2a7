"""Packed batches. Entry i of `targets`, `mask` and fields belongs to the prediction made at position i."""

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
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
        columns |= {name: _or_empty(columns[name]) for name in ("media", "groups")}
        return cls(**columns, cu_seqlens=cumulative(columns["lengths"]))

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
        """Packs rows [S, L] padded left or right. labels: unshifted, -100 is not counted. fields: entry j predicts token j."""
        padding, spans = padding_of(input_ids, attention_mask)
        rows = unpadded(input_ids, spans, labels, fields or {}, groups)
        return replace(cls.pack(rows, dtype=dtype), padding=padding)

    def unpack(self, values: Tensor, *, by_token: bool = False) -> Tensor | list[Tensor]:
        """values [T] by sequence: [S, L] of a batch `from_padded`, zeros in the padding, else a list of [n].

        Entry i belongs to the prediction at token i, as what `score` returns; by_token: to that of token i, as `labels`.
        """
        self._check_column("values", values)
        rows = list(values.split(self.lengths))
        if by_token:
            rows = [torch.cat([torch.zeros_like(row[:1]), row[:-1]]) for row in rows]
        return rows if self.padding is None else self.padding.pad(rows)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """[T]"""
        counts = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.repeat_interleave(
            torch.arange(len(counts), device=counts.device), counts, output_size=len(self)
        )

    @property
    def group_ids(self) -> Tensor:
        """int64 [S], -1 for none."""
        ids = [
            -1 if group is None else group for group in self.groups or (None,) * self.num_sequences
        ]
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
            raise DataError(f"the mask is {kind_of(mask)}; give torch.bool, as in mask > 0")
        return replace(self, mask=mask)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """All but the media."""
        place = torch.device(device)
        move = (
            partial(to_device, device=place)
            if non_blocking
            else partial(torch.Tensor.to, device=place)
        )
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
            padding=self.padding and self.padding.select(sequences),
        )

    def token_index(self, sequences: Seq[int]) -> Tensor:
        ends = [0, *accumulate(self.lengths)]
        spans = [torch.arange(ends[s], ends[s + 1]) for s in sequences]
        return torch.cat(spans or [torch.arange(0)]).to(self.tokens.device)

    def compact(self, index: Tensor) -> "PackedBatch":
        """The tokens at sorted positions `index` [n], without media and routing; `lengths` stay."""
        cu_seqlens = torch.searchsorted(index, self.cu_seqlens.to(index.dtype), out_int32=True)
        return replace(self, media=(), routing=None)._map(lambda x: x[index], cu_seqlens=cu_seqlens)

    def pad_to_multiple(self, multiple: int) -> "PackedBatch":
        return self.padded(-len(self) % multiple if len(self) else multiple)

    def padded(self, missing: int) -> "PackedBatch":
        if not missing:
            return self
        names = ("tokens", "targets", "mask")
        padded = {
            name: torch.nn.functional.pad(getattr(self, name), (0, missing)) for name in names
        }
        fill = {name: 1.0 if name == "temperature" else 0.0 for name in self.fields}
        fields = {
            n: torch.nn.functional.pad(x, (0, missing), value=fill[n])
            for n, x in self.fields.items()
        }
        lengths = (*self.lengths, missing)
        more = torch.arange(missing, device=self.positions.device)
        if self.positions.dim() > 1:
            more = more.expand(len(self.positions), missing)
        return replace(
            self,
            **padded,
            positions=torch.cat([self.positions, more], dim=-1),
            cu_seqlens=cumulative(lengths).to(self.cu_seqlens.device),
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
            wanted = f"a tensor [{len(self)}] on {self.tokens.device}, an entry for every token of the batch"
            raise DataError(f"{name} is {kind_of(x)}; expected {wanted} (dt.Sequence packs lists)")

    def _map(self, fn: Callable[[Tensor], Tensor], **by_sequence: Any) -> "PackedBatch":
        """`fn` of all columns [T]."""
        columns: dict[str, Any] = {
            name: fn(vars(self)[name]) for name in ("tokens", "targets", "mask")
        }
        if self.positions.dim() == 1:
            columns["positions"] = fn(self.positions)
        else:
            columns["positions"] = torch.stack([fn(row) for row in self.positions])
        columns["fields"] = {name: fn(x) for name, x in self.fields.items()}
        columns["routing"] = None if self.routing is None else self.routing.map(fn)
        return replace(self, **columns, **by_sequence)


def start_reading(media: Iterable[Media | None]) -> None:
    for item in media:
        if isinstance(item, LazyMedia):
            item.start()


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x.to(device)` without waiting for the device."""
    on_host = x.device.type == "cpu"
    return (x.pin_memory() if on_host and device.type == "cuda" else x).to(
        device, non_blocking=on_host
    )


def cumulative(lengths: Seq[int]) -> Tensor:
    """int32 [S + 1]"""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def _or_empty(items: list[T | None]) -> tuple[T | None, ...]:
    return tuple(items) if any(item is not None for item in items) else ()
