"""Micro-batches: a padded batch, the part of its tokens that is one rank's, and the halves that blocks compute in turns."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch, carried
from dovetail.batch.routing import Routes


@dataclass(frozen=True)
class ContextShard:
    """The part of every micro-batch's tokens that one of `size` context-parallel ranks holds.

    `ulysses` neighbors together hold a contiguous stretch, each a slice of it; the size / ulysses groups of neighbors
    hold two chunks each, the i-th first and the i-th last, so that causal attention costs them the same.
    """

    rank: int = 0
    size: int = 1
    ulysses: int = 1

    @property
    def lines(self) -> int:
        """Groups of neighbors."""
        return self.size // self.ulysses

    @property
    def chunks(self) -> tuple[int, int]:
        """The two of 2 x lines equal chunks of tokens that this rank's group holds."""
        first = self.rank // self.ulysses
        return first, 2 * self.lines - 1 - first

    def order(self, num_tokens: int) -> Tensor:
        """int64 [T / size]: which of T tokens are this rank's, rising. T is a multiple of 2 x size, or size is 1."""
        if self.size == 1:
            return torch.arange(num_tokens)
        assert num_tokens % (2 * self.size) == 0, f"{num_tokens} tokens over cp={self.size}"
        length, mine = num_tokens // (2 * self.lines), num_tokens // self.size
        stretch = torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in self.chunks])
        at = self.rank % self.ulysses * mine
        return stretch[at : at + mine]


WHOLE = ContextShard()


@dataclass(frozen=True)
class MicroBatch:
    """A padded batch, and what of it is this rank's: the tokens `order` [t] of `batch`.

    `counted` are this rank's counted tokens [n]: the rows `index` of its t, the rows `mine` of `all_counted`, which are
    those of all context-parallel ranks. routes: of this rank's tokens between blocks, t / tp; filled as layers are computed.
    halves: none, or two that blocks compute in turns (`nn.turns`), each padded by itself: every rank's tokens between blocks are
    its tokens of the first half, then those of the second. first: tokens of the first, without padding.
    """

    batch: PackedBatch
    order: Tensor
    index: Tensor
    counted: PackedBatch
    mine: Tensor
    all_counted: PackedBatch
    share: ContextShard = WHOLE
    routes: Routes | None = None
    halves: tuple["MicroBatch", ...] = ()
    first: int = 0

    @classmethod
    def of(cls, batch: PackedBatch, multiple: int = 1, share: ContextShard = WHOLE) -> "MicroBatch":
        """`batch`, padded to `multiple` tokens, as the rank with this share of it has it."""
        padded = batch.pad_to_multiple(multiple)
        return cls._of(padded, share.order(len(padded)).to(padded.tokens.device), share)

    @classmethod
    def halved(cls, batch: PackedBatch, cut: int, multiple: int, share: ContextShard, tp: int) -> "MicroBatch":
        """As two halves, the first of `cut` sequences. tp: ranks that cut tokens between blocks, a divisor of `multiple`."""
        sequences = range(batch.num_sequences)
        parts = [batch.select(some) for some in (sequences[:cut], sequences[cut:])]
        halves = tuple(cls.of(part, multiple, share) for part in parts)
        first, end = len(parts[0]), len(batch)
        orders: list[Tensor] = []  # in the numbers of all tokens, the padding of both halves behind them
        for part, half in zip(parts, halves, strict=True):
            start = first if orders else 0
            orders.append(torch.where(half.order < len(part), half.order + start, half.order - len(part) + end))
            end += len(half.batch) - len(part)
        order = torch.cat([piece for rank in zip(*(each.chunk(tp) for each in orders), strict=True) for piece in rank])
        return replace(cls._of(batch.padded(end - len(batch)), order, share), halves=halves, first=first)

    @classmethod
    def _of(cls, padded: PackedBatch, order: Tensor, share: ContextShard) -> "MicroBatch":
        everywhere = padded.mask.nonzero()[:, 0]
        rows = torch.full((len(padded),), -1, device=order.device)
        rows[order] = torch.arange(len(order), device=order.device)
        index = rows[everywhere]
        mine = (index >= 0).nonzero()[:, 0]
        all_counted = padded.compact(everywhere)
        counted = all_counted if share.size == 1 else padded.compact(everywhere[mine])
        return cls(padded, order, index[mine], counted, mine, all_counted, share)

    def __len__(self) -> int:
        return int(self.order.shape[0])

    @property
    def tokens(self) -> Tensor:
        """This rank's tokens [t]."""
        return self.batch.tokens if self.share.size == 1 and not self.halves else self.batch.tokens[self.order]

    @property
    def apart(self) -> tuple["MicroBatch", ...]:
        """What blocks compute: its halves, or all of it."""
        return self.halves or (self,)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """On a device, which may still have to do whatever it was given before: the host does not wait for it."""
        device = torch.device(device)
        batch, counted = self.batch.carried(device), self.counted.carried(device)
        return replace(
            self,
            batch=batch,
            order=carried(self.order, device),
            index=carried(self.index, device),
            counted=counted,
            mine=carried(self.mine, device),
            all_counted=counted if self.all_counted is self.counted else self.all_counted.carried(device),
            halves=tuple(half.to(device) for half in self.halves),
        )
