"""Keys and values of all lines of a cp axis in token order, and their gradients back to the ranks they are of.

A line holds two chunks of c tokens: of L lines the i-th holds the i-th of 2 L chunks, and the i-th last. Let M be the bytes
of the keys and values of all T = 2 L c tokens. A rank then reads or writes, beside attention and what the network brings:

    forward    2 M / L            for the join of its own keys and values
               M                  for the later half turned round, while the earlier half still comes (copy engines: M / L)
    backward   (2 + 1 / (2 L)) M  for the gradients of both stretches of keys of one document, laid down as they leave
               (1 + 1 / L) M      for the sum of what comes
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dovetail.comm import begin_sum_in_order, gather_mirrored, nothing
from dovetail.mesh import Axis


def share_keys(
    k: Tensor,
    v: Tensor,
    stretches: Sequence[slice],
    axis: Axis,
    add: Callable[..., Tensor],
    during: Callable[[], None] = nothing,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This line's k and v [t, G, C] -> the keys and the values of each stretch [n, G, C] of all lines' T tokens.

    They come one by one, as far as they have arrived: those of the first half of all tokens before the second half has. They
    are views of one tensor, and nobody may write to them. Gradients are rounded to k's dtype on the rank whose
    queries ask for them and then summed by `add`, [L, ...] -> [...], in rank order. `during` goes on while they travel.
    """
    *found, arrive = _SharedKeys.apply(k, v, tuple(stretches), axis, add, during)
    half, arrived = len(k) * axis.size // 2, False
    for stretch, key, value in zip(stretches, found[::2], found[1::2], strict=True):
        if stretch.stop > half and not arrived:
            arrive()
            arrived = True
        yield key, value


class _SharedKeys(torch.autograd.Function):
    """forward: all_gather, cut into stretches. backward: the stretches' gradients laid together, all_to_all, sum."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        stretches: tuple[slice, ...],
        axis: Axis,
        add: Callable[..., Tensor],
        during: Callable[[], None],
    ) -> tuple[Any, ...]:
        ctx.stretches, ctx.axis, ctx.add, ctx.during, ctx.own = stretches, axis, add, during, len(k)
        everything, arrive = gather_mirrored(torch.cat((k, v), dim=1), axis)
        return *(x for stretch in stretches for x in everything[stretch].chunk(2, dim=1)), arrive

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        parts = lay_down(grads[:-1], ctx.stretches, ctx.own, ctx.axis.size)
        begun = begin_sum_in_order(parts, ctx.axis, ctx.add)
        ctx.during()
        dk, dv = begun.take()
        return dk, dv, None, None, None, None


def lay_down(grads: Sequence[Tensor], stretches: Sequence[slice], own: int, lines: int) -> Tensor:
    """The gradients of the keys and of the values of each stretch, [n, G, C] each -> [lines, 2, own, G, C]: by line, of keys
    and of values, by its tokens. Where stretches overlap they are added, and zero where there is none.

    Every number is read and written once, and every piece is dense in what is written.
    """
    size = own // 2
    out = grads[0].new_empty((lines, 2, own, *grads[0].shape[1:]))
    ends = {end for stretch in stretches for end in (stretch.start, stretch.stop)}
    for start, stop in pairwise(sorted({*range(0, lines * own + 1, size), *ends})):
        chunk, at = divmod(start, size)
        line, at = (chunk, at) if chunk < lines else (2 * lines - 1 - chunk, at + size)
        for kind, place in enumerate(out[line, :, at : at + stop - start]):
            _add_into(
                place,
                [
                    grad[start - stretch.start : stop - stretch.start]
                    for grad, stretch in zip(grads[kind::2], stretches, strict=True)
                    if stretch.start <= start and stop <= stretch.stop
                ],
            )
    return out


def _add_into(place: Tensor, parts: Sequence[Tensor]) -> None:
    """place = the sum of the parts, whatever was there."""
    if not parts:
        place.zero_()
    elif len(parts) == 1:
        place.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=place)
        for part in parts[2:]:
            place.add_(part)
