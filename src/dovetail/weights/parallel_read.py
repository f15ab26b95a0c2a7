"""Parallel reads: rectangles of tensors, by several threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import torch
from torch import Tensor

from dovetail.memory import wait_for
from dovetail.parallel.placement import Slices, shape_of

READERS = 8
BUFFER_BYTES = 1 << 22  # of a thread
JOB_BYTES = 1 << 25  # no thread ends late
MAX_GAP = 1 << 16  # bytes between ranges of a call
MAX_RANGES = 1 << 15  # of a rectangle
MAX_BUFFERS = 1024  # of a `preadv`: UIO_MAXIOV

ReadJob = Callable[[Tensor], object]  # its thread's buffer [bytes]


def run_jobs(jobs: Sequence[ReadJob], device: torch.device) -> None:
    """Run the jobs by READERS threads."""
    if not jobs:
        return
    pinned = device.type != "cpu"
    queue = iter(jobs)
    shape = (min(READERS, len(jobs)), BUFFER_BYTES)
    buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)

    def work(buffer: Tensor) -> None:
        if pinned:
            torch.get_device_module(device).set_device(device)
        for job in queue:  # thread-safe
            job(buffer)

    with ThreadPoolExecutor(len(buffers)) as threads:
        for future in [threads.submit(work, buffer) for buffer in buffers]:
            future.result()


def blocks(slices: Slices, out: Tensor, max_elements: int) -> Iterator[tuple[Slices, Tensor]]:
    """Yield parts of at most `max_elements`, with their targets."""
    if out.numel() <= max_elements or not slices:
        yield slices, out
        return
    (start, stop), *rest = slices
    rows = max_elements // prod(out.shape[1:])
    for at in range(start, stop, max(1, rows)):
        if rows:
            end = min(at + rows, stop)
            yield ((at, end), *rest), out[at - start : end - start]
        else:
            for inner, part in blocks(tuple(rest), out[at - start], max_elements):
                yield ((at, at + 1), *inner), part


def job_parts(slices: Slices, out: Tensor, dtype: torch.dtype) -> Iterator[tuple[Slices, Tensor]]:
    return blocks(slices, out, JOB_BYTES // dtype.itemsize)


def range_elements(shape: Sequence[int], slices: Slices) -> int:
    return prod(shape_of(slices)[_last_cut(shape, slices) :])


def byte_ranges(shape: Sequence[int], slices: Slices, itemsize: int) -> tuple[list[int], int]:
    """Return offsets and length, in bytes, of the contiguous ranges of a rectangle."""
    if any(start == stop for start, stop in slices):
        return [], 0
    last_cut = _last_cut(shape, slices)
    offsets = np.zeros(1, dtype=np.int64)
    for dim, (start, stop) in enumerate(slices):
        stride = itemsize * prod(shape[dim + 1 :])
        rows = np.arange(start, stop if dim < last_cut else start + 1)
        offsets = (offsets[:, None] + rows * stride).reshape(-1)
    return offsets.tolist(), itemsize * range_elements(shape, slices)


def scatter_reads(
    offsets: Sequence[int], length: int, view: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield (offset, buffers) of `preadv` calls that read ranges into `view`.

    Short gaps go to scratch memory.
    """
    scratch = memoryview(bytearray(MAX_GAP))
    buffers: list[memoryview] = []
    first = 0
    end = 0
    for i, offset in enumerate(offsets):
        if buffers and (offset - end > MAX_GAP or len(buffers) + 2 > MAX_BUFFERS):
            yield first, buffers
            buffers = []
        if not buffers:
            first = offset
        elif offset > end:
            buffers.append(scratch[: offset - end])
        buffers.append(view[i * length : (i + 1) * length])
        end = offset + length
    if buffers:
        yield first, buffers


def copy_out(block: Tensor, out: Tensor) -> None:
    if out.device.type != "cpu":
        block = block.to(out.device, non_blocking=True)
    out.copy_(block.view(out.shape))
    wait_for(out.device)


def _last_cut(shape: Sequence[int], slices: Slices) -> int:
    """Return the last dim of which the rectangle has a part only, or 0."""
    last = 0
    for dim, (start, stop) in enumerate(slices):
        if stop - start != shape[dim]:
            last = dim
    return last
