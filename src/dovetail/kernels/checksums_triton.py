"""`inference_servers.checksums.add_words` as a Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

BLOCK = 2048  # words per step
PROGRAMS = 132 * 8  # eight a multiprocessor


def add_words(words: Tensor, total: Tensor, first: int) -> None:
    """Adds mixed words [n] int64 to `total` [] int64. first: the first word's number."""
    grid = (min(triton.cdiv(len(words), BLOCK), PROGRAMS),)
    _add_words[grid](words, total, len(words), first, BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["count", "first"])
def _add_words(
    words: tensor, total: tensor, count: tensor, first: tensor, BLOCK: constexpr
) -> None:
    sums = tl.zeros((BLOCK,), tl.int64)
    step = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    place = lane.to(tl.uint64) * step
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + lane
        x = tl.load(words + at, mask=at < count, other=0).to(tl.uint64, bitcast=True)
        x ^= place + (start + first).to(tl.uint64) * step
        x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
        x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
        x ^= x >> 31
        sums += tl.where(at < count, x, 0).to(tl.int64, bitcast=True)
    tl.atomic_add(total, tl.sum(sums, 0))
