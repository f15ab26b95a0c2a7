"""Paged attention of one new token per row as Triton kernels (split-KV decoding)."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from dovetail.kernels import reference
from dovetail.kernels.norm_triton import shared_bytes

BLOCK = constexpr(64)  # entries per step
LOG2_E = constexpr(math.log2(math.e))
STAGES = 2
FEW_WARPS = 2
WARPS = 4
COMBINE_WARPS = 1
FEW_WARPS_SIZE = 2048  # outputs per program
MIN_QUERIES = 16
PROGRAMS = 264  # fill a GPU of 132 multiprocessors
MAX_SPLITS = 32


class Shape(NamedTuple):
    """Queries of a KV head and channels, with their padded sizes; entries of a page; window or 0."""

    queries: int
    padded_queries: int
    dim: int
    padded_dim: int
    page: int
    window: int


class EntryShape(NamedTuple):
    """Entries of a page; channels of an entry, of a new key and value, and of a padded key."""

    page: int
    dim: int
    k_dim: int
    v_dim: int
    padded_dim: int


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    window: int | None = None,
) -> Tensor:
    """No host sync; launches do not depend on lengths."""
    rows, heads, dim = q.shape
    if q.dtype == torch.float64 or dim > reference.MAX_PAGED_DIM or not rows:
        return reference.decode_attention(q, keys, values, table, lengths, window)
    assert keys.is_contiguous() and values.is_contiguous()
    _, groups, page, _ = keys.shape
    splits = splits_for(rows * groups, table.shape[1] * page)
    queries = heads // groups
    width = max(16, triton.next_power_of_2(dim))
    shape = Shape(
        queries, max(MIN_QUERIES, triton.next_power_of_2(queries)), dim, width, page, window or 0
    )
    partial = torch.empty(rows * heads * splits * (dim + 2), dtype=torch.float32, device=q.device)
    stages = stages_for(shape.padded_queries, width, q.itemsize, shared_bytes(q.device))
    options = {"num_warps": warps_for(shape.padded_queries, width), "num_stages": stages}
    grid = (rows, groups, splits)
    stride = table.stride(0)
    _split[grid](q.contiguous(), keys, values, table, lengths, partial, stride, shape, **options)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _combine[(rows, heads)](partial, out, dim, width, splits, num_warps=COMBINE_WARPS)
    return out


def write_entries(
    keys: Tensor, values: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor
) -> None:
    n, groups, dim = k.shape
    if not n:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    assert keys.is_contiguous() and values.is_contiguous()
    shape = EntryShape(keys.shape[2], keys.shape[3], dim, v.shape[2], triton.next_power_of_2(dim))
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    _write[(n, groups)]((keys, values), pages, offsets, (k, v), strides, shape, num_warps=1)


def splits_for(pairs: int, capacity: int) -> int:
    wanted = min(-(-PROGRAMS // pairs), -(-capacity // BLOCK.value), MAX_SPLITS)
    return 1 << (wanted - 1).bit_length()


def warps_for(queries: int, width: int) -> int:
    return FEW_WARPS if queries * width <= FEW_WARPS_SIZE else WARPS


def stages_for(queries: int, width: int, itemsize: int, shared: int) -> int:
    """1 where shared memory is too small."""
    numbers = STAGES * BLOCK.value * width + queries * (width + BLOCK.value)
    return STAGES if numbers * itemsize <= shared else 1


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def _write(
    cache: tensor,
    pages: tensor,
    offsets: tensor,
    entries: tensor,
    strides: tensor,
    SHAPE: constexpr,
) -> None:
    keys, values = cache
    k, v = entries
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    page = tl.load(pages + token).to(tl.int64)
    place = (
        (page * tl.num_programs(1) + group) * SHAPE.page + tl.load(offsets + token)
    ) * SHAPE.dim
    channel = tl.arange(0, SHAPE.padded_dim)
    key = tl.load(k + token * strides[0] + group * strides[1] + channel, mask=channel < SHAPE.k_dim)
    value = tl.load(
        v + token * strides[2] + group * strides[3] + channel, mask=channel < SHAPE.v_dim
    )
    tl.store(keys + place + channel, key, mask=channel < SHAPE.k_dim)
    tl.store(values + place + channel, value, mask=channel < SHAPE.v_dim)


@triton.jit
def _split(
    q: tensor,
    keys: tensor,
    values: tensor,
    table: tensor,
    lengths: tensor,
    partial: tensor,
    stride: tensor,
    SHAPE: constexpr,
) -> None:
    """Weighted sums of values, then maxima and sums of weights (base 2)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    split = tl.program_id(2)
    groups = tl.num_programs(1)
    splits = tl.num_programs(2)
    length = tl.load(lengths + row).to(tl.int32)
    low = 0
    if SHAPE.window > 0:
        low = tl.maximum(length - SHAPE.window, 0)
    first = low // BLOCK
    last = (length + BLOCK - 1) // BLOCK
    per_split = (last - first + splits - 1) // splits
    start = first + split * per_split
    stop = tl.minimum(start + per_split, last)
    ROWS: constexpr = SHAPE.padded_queries
    WIDTH: constexpr = SHAPE.padded_dim
    query = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    head = (row * groups + group) * SHAPE.queries + query
    real = (query < SHAPE.queries)[:, None] & (channel < SHAPE.dim)[None, :]
    queries = tl.load(q + head[:, None] * SHAPE.dim + channel[None, :], mask=real, other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for block in range(start, stop):
        at = block * BLOCK + tl.arange(0, BLOCK)
        seen = (at >= low) & (at < length)
        page = tl.load(table + row * stride + at // SHAPE.page, mask=seen, other=0).to(tl.int64)
        place = (page * groups + group) * SHAPE.page + at % SHAPE.page
        offset = place[:, None] * SHAPE.dim + channel[None, :]
        valid = seen[:, None] & (channel < SHAPE.dim)[None, :]
        k = tl.load(keys + offset, mask=valid, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * (SHAPE.dim**-0.5 * LOG2_E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        v = tl.load(values + offset, mask=valid, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
    part = head * splits + split
    stats = (
        partial
        + tl.num_programs(0).to(tl.int64) * groups * SHAPE.queries * splits * SHAPE.dim
        + part * 2
    )
    tl.store(partial + part[:, None] * SHAPE.dim + channel[None, :], mixed, mask=real)
    tl.store(stats, peak, mask=query < SHAPE.queries)
    tl.store(stats + 1, total, mask=query < SHAPE.queries)


@triton.jit
def _combine(
    partial: tensor, out: tensor, DIM: constexpr, WIDTH: constexpr, SPLITS: constexpr
) -> None:
    heads = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    part = head * SPLITS + tl.arange(0, SPLITS)
    stats = partial + heads * SPLITS * DIM + part * 2
    peak = tl.load(stats)
    total = tl.load(stats + 1)
    share = tl.exp2(peak - tl.max(peak, 0))
    mixed = tl.load(
        partial + part[:, None] * DIM + channel[None, :], mask=(channel < DIM)[None, :], other=0.0
    )
    joined = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * DIM + channel, joined.to(out.dtype.element_ty), mask=channel < DIM)
