"""The checksum of a tensor's bytes, bit for bit that of Dovetail (dovetail/inference_servers/checksums.py)."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # engines on CPUs
    triton = None

STEP, FIRST, SECOND = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # of SplitMix64, as int64
BLOCK, PROGRAMS = 2048, 132 * 8
PIECE = 1 << 16  # words at once on a CPU


def checksums_of(tensors: list[Tensor]) -> list[str]:
    """16 hexadecimal digits for each tensor. Waits for the device once."""
    if not tensors:
        return []
    totals = torch.tensor([t.numel() * t.element_size() for t in tensors], device=tensors[0].device)
    for tensor, total in zip(tensors, totals, strict=True):
        _add(tensor, total)
    return [f"{number % (1 << 64):016x}" for number in totals.tolist()]


def _add(tensor: Tensor, total: Tensor) -> None:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    count, rest = divmod(len(data), 8)
    pieces = [(data[: 8 * count].view(torch.int64), 0)] if count else []
    if rest:
        end = data.new_zeros(8)
        end[:rest] = data[8 * count :]
        pieces.append((end.view(torch.int64), count))
    for words, first in pieces:
        if words.is_cuda and triton is not None:
            _kernel[(min(triton.cdiv(len(words), BLOCK), PROGRAMS),)](
                words, total, len(words), first, BLOCK, num_warps=8
            )
            continue
        for start in range(0, len(words), PIECE):
            x = words[start : start + PIECE]
            x = x ^ torch.arange(first + start, first + start + len(x), device=x.device) * STEP
            x = (x ^ (x >> 30 & (1 << 34) - 1)) * FIRST
            x = (x ^ (x >> 27 & (1 << 37) - 1)) * SECOND
            total += (x ^ (x >> 31 & (1 << 33) - 1)).sum()


if triton is not None:

    @triton.jit(do_not_specialize=["count", "first"])
    def _kernel(words, total, count, first, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        sums = tl.zeros((BLOCK,), tl.int64)
        step, lane = tl.full((), 0x9E3779B97F4A7C15, tl.uint64), tl.arange(0, BLOCK).to(tl.int64)
        place = lane.to(tl.uint64) * step
        for start in tl.range(
            tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK
        ):
            at = start + lane
            x = tl.load(words + at, mask=at < count, other=0).to(tl.uint64, bitcast=True)
            x ^= place + (start + first).to(tl.uint64) * step
            x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
            x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
            x ^= x >> 31
            sums += tl.where(at < count, x, 0).to(tl.int64, bitcast=True)
        tl.atomic_add(total, tl.sum(sums, 0))
