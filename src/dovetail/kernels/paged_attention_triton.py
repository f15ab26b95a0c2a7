"""Attention of one new token a row to a paged cache as Triton kernels: what a row holds is read once, by several programs.

A program owns some of a row's entries under one KV head, with all queries of that head; a second kernel joins what the
programs of a row found. Which entries there are is read on the device, so a launch does not depend on lengths. Importing
this needs triton.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import reference
from dovetail.kernels.norm_triton import shared_bytes

BLOCK = tl.constexpr(64)  # entries that one step of a program reads
LOG2_E = tl.constexpr(math.log2(math.e))
STAGES = 2
FEW_WARPS, WARPS = 2, 4
LITTLE = 2048  # numbers of a program's sum that few warps hold in registers
JOIN_WARPS = 1
LEAST_QUERIES = 16  # rows of the smallest product on tensor cores
PROGRAMS = 264  # that fill a GPU of 132 multiprocessors
MOST_SPLITS = 32


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, window: int | None = None
) -> Tensor:
    """As `reference.decode_attention`, without asking the device for anything; float64 and longer heads take the reference."""
    rows, heads, dim = q.shape
    if q.dtype == torch.float64 or dim > reference.LONGEST_PAGED or not rows:
        return reference.decode_attention(q, keys, values, table, lengths, window)
    assert keys.is_contiguous() and values.is_contiguous(), "pages are expected as the cache holds them"
    _, groups, page, _ = keys.shape
    splits = splits_for(rows * groups, table.shape[1] * page)
    queries, width = heads // groups, max(16, triton.next_power_of_2(dim))
    shape = (queries, max(LEAST_QUERIES, triton.next_power_of_2(queries)), dim, width, page, window or 0)
    found = torch.empty(rows * heads * splits * (dim + 2), dtype=torch.float32, device=q.device)
    how = {
        "num_warps": warps_for(shape[1], width),
        "num_stages": stages_for(shape[1], width, q.itemsize, shared_bytes(q.device)),
    }
    _partial[(rows, groups, splits)](q.contiguous(), keys, values, table, lengths, found, table.stride(0), shape, **how)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _join[(rows, heads)](found, out, dim, width, splits, num_warps=JOIN_WARPS)
    return out


def write_entries(keys: Tensor, values: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """As `reference.write_entries`, keys and values in one pass."""
    n, groups, dim = k.shape
    if not n:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    assert keys.is_contiguous() and values.is_contiguous(), "pages are expected as the cache holds them"
    shape = (keys.shape[2], keys.shape[3], dim, v.shape[2], triton.next_power_of_2(dim))
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    _write[(n, groups)]((keys, values), pages, offsets, (k, v), strides, shape, num_warps=1)


def splits_for(pairs: int, capacity: int) -> int:
    """Programs for each pair of row and KV head, a power of two: as many as fill the GPU and may find something to read."""
    wanted = min(-(-PROGRAMS // pairs), -(-capacity // BLOCK.value), MOST_SPLITS)
    return 1 << (wanted - 1).bit_length()


def warps_for(queries: int, width: int) -> int:
    """Of a program: few, which wait for each other less, where registers hold what it sums up."""
    return FEW_WARPS if queries * width <= LITTLE else WARPS


def stages_for(queries: int, width: int, itemsize: int, room: int) -> int:
    """STAGES, or 1 where a program's shared memory has no room for keys and values of a block, the queries and their weights."""
    held = STAGES * BLOCK.value * width + queries * (width + BLOCK.value)
    return STAGES if held * itemsize <= room else 1


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def _write(
    held: tl.tensor,
    pages: tl.tensor,
    offsets: tl.tensor,
    new: tl.tensor,
    strides: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """A token's key and value under one KV head. SHAPE: entries of a page, channels of an entry, of a key, of a value, and of a
    key filled up to a power of 2.
    """
    PAGE: tl.constexpr = SHAPE[0]
    HELD: tl.constexpr = SHAPE[1]
    keys, values = held
    k, v = new
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    page = tl.load(pages + token).to(tl.int64)
    place = ((page * tl.num_programs(1) + group) * PAGE + tl.load(offsets + token)) * HELD
    channel = tl.arange(0, SHAPE[4])
    key = tl.load(k + token * strides[0] + group * strides[1] + channel, mask=channel < SHAPE[2])
    value = tl.load(v + token * strides[2] + group * strides[3] + channel, mask=channel < SHAPE[3])
    tl.store(keys + place + channel, key, mask=channel < SHAPE[2])
    tl.store(values + place + channel, value, mask=channel < SHAPE[3])


@triton.jit
def _partial(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    found: tl.tensor,
    table_stride: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Over some blocks of a row's entries: the weighted sum of values, then, behind all of these, maximum and sum of weights.

    Powers of 2 throughout. SHAPE: queries of a KV head, the same filled up, channels, the same filled up, entries of a page,
    window or 0.
    """
    QUERIES: tl.constexpr = SHAPE[0]
    FILLED: tl.constexpr = SHAPE[1]
    DIM: tl.constexpr = SHAPE[2]
    WIDTH: tl.constexpr = SHAPE[3]
    PAGE: tl.constexpr = SHAPE[4]
    WINDOW: tl.constexpr = SHAPE[5]
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    split = tl.program_id(2)
    groups = tl.num_programs(1)
    splits = tl.num_programs(2)
    length = tl.load(lengths + row).to(tl.int32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    first = low // BLOCK
    last = (length + BLOCK - 1) // BLOCK
    each = (last - first + splits - 1) // splits
    start = first + split * each
    stop = tl.minimum(start + each, last)
    query = tl.arange(0, FILLED)
    channel = tl.arange(0, WIDTH)
    head = (row * groups + group) * QUERIES + query
    real = (query < QUERIES)[:, None] & (channel < DIM)[None, :]
    queries = tl.load(q + head[:, None] * DIM + channel[None, :], mask=real, other=0.0)
    peak = tl.full((FILLED,), float("-inf"), tl.float32)
    total = tl.zeros((FILLED,), tl.float32)
    mixed = tl.zeros((FILLED, WIDTH), tl.float32)
    for block in range(start, stop):
        at = block * BLOCK + tl.arange(0, BLOCK)
        seen = (at >= low) & (at < length)
        page = tl.load(table + row * table_stride + at // PAGE, mask=seen, other=0).to(tl.int64)
        place = (page * groups + group) * PAGE + at % PAGE
        where = place[:, None] * DIM + channel[None, :]
        there = seen[:, None] & (channel < DIM)[None, :]
        k = tl.load(keys + where, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * (DIM**-0.5 * LOG2_E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))  # finite: every block has an entry that is seen
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        v = tl.load(values + where, mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
    part = head * splits + split
    stats = found + tl.num_programs(0).to(tl.int64) * groups * QUERIES * splits * DIM + part * 2
    tl.store(found + part[:, None] * DIM + channel[None, :], mixed, mask=real)
    tl.store(stats, peak, mask=query < QUERIES)
    tl.store(stats + 1, total, mask=query < QUERIES)


@triton.jit
def _join(found: tl.tensor, out: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr) -> None:
    """One head of one row from what its splits found; at least one of them found something."""
    heads = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    part = head * SPLITS + tl.arange(0, SPLITS)
    stats = found + heads * SPLITS * DIM + part * 2
    peak = tl.load(stats)
    total = tl.load(stats + 1)
    share = tl.exp2(peak - tl.max(peak, 0))
    mixed = tl.load(found + part[:, None] * DIM + channel[None, :], mask=(channel < DIM)[None, :], other=0.0)
    joined = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * DIM + channel, joined.to(out.dtype.element_ty), mask=channel < DIM)
