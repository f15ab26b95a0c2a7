"""Brings bytes from files to where they belong, with several threads: each reads a stretch, and sums it and hands it on
while it is in the processor's cache. Every thread has one small buffer, so the host holds no more than that beside.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor

from dovetail.memory import wait_for
from dovetail.parallel.placement import Slices

READERS = 8  # threads; more than cores, since they wait for the disk
ROOM = 1 << 22  # bytes of a thread's buffer, which stay in the cache
STRETCH = 1 << 25  # bytes of a job: large enough for the disk, small enough that no thread is left with a long one

Job = Callable[[Tensor], object]  # called once, by any thread, with that thread's buffer [bytes]


def do_all(jobs: Sequence[Job], device: torch.device) -> None:
    """Do all jobs, in about this order. Their buffers suit copies to `device`."""
    pinned, left = device.type != "cpu", iter(jobs)
    rooms = [torch.empty(ROOM, dtype=torch.uint8, pin_memory=pinned) for _ in range(min(READERS, len(jobs)))]
    if not rooms:
        return

    def work(room: Tensor) -> None:
        if pinned:  # a thread begins on the first device
            torch.get_device_module(device).set_device(device)
        for job in left:  # an iterator over a sequence gives each item to one thread
            job(room)

    with ThreadPoolExecutor(len(rooms)) as threads:
        for ended in [threads.submit(work, room) for room in rooms]:
            ended.result()


def blocks(slices: Slices, out: Tensor, most: int) -> Iterator[tuple[Slices, Tensor]]:
    """A rectangle and the tensor of its shape, in row-major order in pairs of at most `most` elements."""
    if out.numel() <= most or not slices:
        yield slices, out
        return
    (start, stop), *rest = slices
    rows = most // prod(out.shape[1:])
    for at in range(start, stop, max(1, rows)):
        if rows:
            end = min(at + rows, stop)
            yield ((at, end), *rest), out[at - start : end - start]
        else:
            for inner, part in blocks(tuple(rest), out[at - start], most):
                yield ((at, at + 1), *inner), part


def stretches(slices: Slices, out: Tensor, dtype: torch.dtype) -> Iterator[tuple[Slices, Tensor]]:
    """A rectangle of a stored tensor of `dtype`, and where it goes, in pairs of a job's size."""
    return blocks(slices, out, STRETCH // dtype.itemsize)


def hand_over(piece: Tensor, out: Tensor) -> None:
    """Copy `piece`, on the host, into `out`, and be done with it. Conversion is work for the device of `out`."""
    if out.device.type != "cpu":
        piece = piece.to(out.device, non_blocking=True)
    out.copy_(piece.view(out.shape))
    wait_for(out.device)
