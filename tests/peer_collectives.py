"""Bodies of the tests of `peers`, on a CPU and on GPUs: collectives of any size, several under way, taken in any order."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.parallel.collectives import Pending, begin_gather, begin_scatter
from dovetail.parallel.mesh import Axis

WIDTH = 64
MOST_OPEN = 5  # more than a ring has slots, so that some are waited for before they are taken


class Under(NamedTuple):
    """A collective under way."""

    number: int
    gathers: bool
    rows: int  # of a rank's shard
    begun: Pending


def drawn(number: int, rank: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank brings to a collective: the same wherever it is drawn, for all devices are of one kind."""
    draw = torch.Generator(device).manual_seed(1000 * number + rank)
    return torch.randn(rows, WIDTH, generator=draw, device=device).to(dtype)


def expected(one: Under, axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What it is to give this rank, from what all ranks brought; sums wide, and rounded once."""
    rows = one.rows if one.gathers else one.rows * axis.size
    brought = [drawn(one.number, rank, rows, dtype, device) for rank in range(axis.size)]
    if one.gathers:
        return torch.cat(brought)
    parts = torch.stack([x.chunk(axis.size)[axis.rank] for x in brought])
    return parts.to(torch.float64).sum(0).to(dtype)


def any_order(
    axis: Axis,
    device: torch.device,
    rounds: int,
    most_rows: int,
    dtype: torch.dtype,
    bound: float,
    delay: Callable[[], None] = lambda: None,
) -> int:
    """Each collective gives what it should; how many of them `axis.peers` has begun by then. delay: before each begins."""
    draw, under = random.Random(0), list[Under]()  # the same on all ranks
    for number in range(rounds):
        gathers, rows = draw.random() < 0.5, draw.randrange(most_rows // 4, most_rows)
        x = drawn(number, axis.rank, rows if gathers else rows * axis.size, dtype, device)
        delay()
        under.append(Under(number, gathers, rows, (begin_gather if gathers else begin_scatter)(x, axis)))
        del x  # its memory may not be anybody else's before it was read
        while len(under) > draw.randrange(MOST_OPEN + 1):
            one = under.pop(draw.randrange(len(under)))
            wanted, came = expected(one, axis, dtype, device), one.begun.take()
            limit = 0.0 if one.gathers else bound
            assert bool(((came - wanted).abs() <= limit * wanted.abs().clamp(min=1.0)).all()), (
                f"collective {one.number}"
            )
    assert axis.peers is not None
    return axis.peers.begun
