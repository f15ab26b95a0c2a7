"""Micro-batches, their context-parallel shards, and halves for dual-batch overlap."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from dovetail.batch.balancing import balanced_split
from dovetail.batch.packed import PackedBatch, to_device
from dovetail.batch.routing import Routes
from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh

Item = TypeVar("Item")

MIN_HALF_TOKENS = 2048  # fewer do not pay


@dataclass(frozen=True)
class ContextShard:
    """The i-th group of `ulysses` neighbors holds the i-th and i-th last chunk of tokens, each neighbor a slice."""

    rank: int = 0
    size: int = 1
    ulysses: int = 1

    @property
    def groups(self) -> int:
        return self.size // self.ulysses

    @property
    def chunks(self) -> tuple[int, int]:
        first = self.rank // self.ulysses
        return first, 2 * self.groups - 1 - first

    def order(self, num_tokens: int) -> Tensor:
        """int64 [T / size]: this rank's tokens. T is a multiple of 2 x size."""
        if self.size == 1:
            return torch.arange(num_tokens)
        assert num_tokens % (2 * self.size) == 0, f"{num_tokens} tokens over cp={self.size}"
        length = num_tokens // (2 * self.groups)
        count = num_tokens // self.size
        tokens = torch.cat(
            [torch.arange(chunk * length, (chunk + 1) * length) for chunk in self.chunks]
        )
        start = self.rank % self.ulysses * count
        return tokens[start : start + count]


WHOLE = ContextShard()


@dataclass(frozen=True)
class MicroBatch:
    """halves: none or two; between blocks their tokens alternate by tp rank."""

    batch: PackedBatch
    order: Tensor  # [t], this rank's tokens
    index: Tensor  # [n], its counted tokens in `order`
    counted: PackedBatch  # [n]
    local: Tensor  # [n], the same in `all_counted`
    all_counted: PackedBatch  # of all cp ranks
    shard: ContextShard = WHOLE
    routes: Routes | None = None  # of its t / tp tokens between blocks
    halves: tuple["MicroBatch", ...] = ()
    first: int = 0  # tokens of the first half, without padding
    embeddings: Tensor | None = None  # [T, D] of the whole batch, in place of the table's rows

    @classmethod
    def of(cls, batch: PackedBatch, multiple: int = 1, shard: ContextShard = WHOLE) -> "MicroBatch":
        padded = batch.pad_to_multiple(multiple)
        return cls._of(padded, shard.order(len(padded)).to(padded.tokens.device), shard)

    @classmethod
    def halved(
        cls, batch: PackedBatch, cut: int, multiple: int, shard: ContextShard, tp: int
    ) -> "MicroBatch":
        parts = [batch.select(chosen) for chosen in (range(cut), range(cut, batch.num_sequences))]
        halves = tuple(cls.of(part, multiple, shard) for part in parts)
        first = len(parts[0])
        end = len(batch)
        orders: list[Tensor] = []  # in the whole batch, which ends with the padding of both halves
        for part, half in zip(parts, halves, strict=True):
            start = first if orders else 0
            orders.append(
                torch.where(
                    half.order < len(part), half.order + start, half.order - len(part) + end
                )
            )
            end += len(half.batch) - len(part)
        order = torch.cat(
            [
                piece
                for rank in zip(*(half.chunk(tp) for half in orders), strict=True)
                for piece in rank
            ]
        )
        return replace(
            cls._of(batch.padded(end - len(batch)), order, shard), halves=halves, first=first
        )

    @classmethod
    def _of(cls, padded: PackedBatch, order: Tensor, shard: ContextShard) -> "MicroBatch":
        positions = padded.mask.nonzero()[:, 0]
        rows = torch.full((len(padded),), -1, device=order.device)
        rows[order] = torch.arange(len(order), device=order.device)
        index = rows[positions]
        local = (index >= 0).nonzero()[:, 0]
        all_counted = padded.compact(positions)
        counted = all_counted if shard.size == 1 else padded.compact(positions[local])
        return cls(padded, order, index[local], counted, local, all_counted, shard)

    def __len__(self) -> int:
        return int(self.order.shape[0])

    def rows(self, tp: Axis) -> Tensor:
        """Returns the tokens [t / tp] that this rank of tp holds between blocks."""
        return self.order.chunk(tp.size)[tp.rank]

    @property
    def is_whole(self) -> bool:
        """Not sharded over cp."""
        return self.shard.size == 1

    @property
    def tokens(self) -> Tensor:
        if self.is_whole and not self.halves:
            return self.batch.tokens
        return self.batch.tokens[self.order]

    def to(self, device: torch.device | str) -> "MicroBatch":
        device = torch.device(device)
        counted = self.counted.to(device, non_blocking=True)
        whole = self.all_counted
        return replace(
            self,
            batch=self.batch.to(device, non_blocking=True),
            order=to_device(self.order, device),
            index=to_device(self.index, device),
            counted=counted,
            local=to_device(self.local, device),
            all_counted=counted if whole is self.counted else whole.to(device, non_blocking=True),
            halves=tuple(half.to(device) for half in self.halves),
        )


class LazySequence(Seq[Item]):
    """Items that `make(number)` makes at first access."""

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._numbers = range(count)
        self._make = cache(make)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]  # no slices
        return self._make(self._numbers[index])


@dataclass(frozen=True)
class DualBatch:
    """Which micro-batches are split."""

    min_tokens: int | None  # of the smaller half; None: no split

    @classmethod
    def of(cls, supported: bool, mesh: Mesh, enabled: bool | None) -> "DualBatch":
        """enabled=None: where it is faster (docs/performance.md)."""
        if enabled is None:
            pays = supported and mesh["tp"].size > 1 and mesh["ep"].size == 1
            return cls(MIN_HALF_TOKENS if pays and mesh.device.type != "cpu" else None)
        return cls(1 if enabled and supported else None)

    def should_split(
        self, lengths: Seq[Seq[int]], multiple: int = 1, budget: int | None = None
    ) -> bool:
        """lengths: of a micro-batch's sequences in every replica."""
        if self.min_tokens is None or min(map(len, lengths)) < 2:
            return False
        for replica in lengths:
            split = balanced_split(replica)
            halves = [sum(replica[:split]), sum(replica[split:])]
            padded = sum(-(-half // multiple) * multiple for half in halves)
            if min(halves) < self.min_tokens or (budget is not None and padded > budget):
                return False
        return True
