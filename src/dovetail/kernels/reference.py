"""The definition of every op, in plain torch, without T x T or T x V temporaries."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 128  # up to here a CPU is faster without flash attention
QUERY_BLOCK = 256  # queries per mask
CPU_BLOCK = 1 << 20
GPU_BLOCK = 1 << 27  # logits per elementwise pass
GATHER_BLOCK = 1 << 19  # numbers gathered at a time
MAX_PAGED_DIM = 256  # of other implementations


@dataclass(frozen=True)
class Spans:
    """Packed sequences: `cu_seqlens` int32 [S + 1] on the device, lengths on the host."""

    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; rms in `wide`, the product in x's dtype."""
    y = widened(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if y is None else x + y
    return total, rms_norm(total, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + R / 2 of x [T, H, C] by cos and sin [T, R / 2]."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def heads(
    qkv: Tensor,
    counts: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    *,
    norm: Callable[..., Tensor] = rms_norm,
    rotate: Callable[..., Tensor] = rope,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (H + 2 G) C] -> q [T, H, C], k and v [T, G, C]; q and k normed by `gains` [C] and rotated. counts: H, G."""
    queries, groups = counts
    q, k, v = qkv.unflatten(-1, (queries + 2 * groups, -1)).split((queries, groups, groups), dim=1)
    if gains is not None:
        q = norm(q, gains[0], eps)
        k = norm(k, gains[1], eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None
) -> Tensor:
    """Causal attention in each packed sequence: q [Tq, H, C], k [Tk, G, C], v [Tk, G, Cv <= C] -> [Tq, H, Cv].

    Aligned at the bottom right. window: keys a query sees.
    """
    if (v_dim := v.shape[-1]) < q.shape[-1]:
        return attention(q, k, pad_values(k, v), q_spans, k_spans, window)[..., :v_dim]
    out = []
    for count, n, m, start_q, start_k in _equal_runs(q_spans.lengths, k_spans.lengths):
        queries = (
            q[start_q : start_q + count * n].unflatten(0, (count, n)).transpose(1, 2)
        )  # [B, H, n, C]
        keys, values = (
            x[start_k : start_k + count * m].unflatten(0, (count, m)).transpose(1, 2)
            for x in (k, v)
        )
        if n == m and (window is None or m <= window):
            mixed = _causal_attention(queries, keys, values)
        else:
            mixed = _masked_attention(queries, keys, values, window)
        out.append(mixed.transpose(1, 2).flatten(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


def pad_values(k: Tensor, v: Tensor) -> Tensor:
    return v if v.shape[-1] == k.shape[-1] else F.pad(v, (0, k.shape[-1] - v.shape[-1]))


def _equal_runs(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of equal lengths: (count, queries, keys, first query, first key)."""
    start_q = start_k = 0
    for (n, m), run in itertools.groupby(zip(q_lengths, k_lengths, strict=True)):
        count = len(list(run))
        if n:
            yield count, n, m, start_q, start_k
        start_q = start_q + count * n
        start_k = start_k + count * m


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    if n > SHORT or q.dtype in (torch.float32, torch.float64):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    grouped = q.reshape(
        -1, k.shape[1], q.shape[1] // k.shape[1] * n, q.shape[3]
    )  # [B, G, H / G n, C]
    scores = (
        (grouped @ k.transpose(2, 3))
        .to(torch.float32)
        .mul_(q.shape[3] ** -0.5)
        .unflatten(2, (-1, n))
    )
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(q.dtype)
    return (weights.flatten(2, 3) @ v).view(q.shape)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    n = q.shape[2]
    m = k.shape[2]
    blocks = []
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        first = start + m - n
        last = stop + m - n
        low = 0 if window is None else max(0, first - window + 1)
        at_q = torch.arange(first, last, device=q.device)[:, None]
        at_k = torch.arange(low, last, device=q.device)[None, :]
        mask = at_k <= at_q if window is None else (at_k <= at_q) & (at_k > at_q - window)
        block = q[:, :, start:stop], k[:, :, low:last], v[:, :, low:last]
        blocks.append(
            F.scaled_dot_product_attention(
                *block, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(blocks, dim=2)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    window: int | None = None,
) -> Tensor:
    """One new token per row: q [B, H, C], keys and values [P, G, page, C] -> [B, H, C]; table [B, W]: pages."""
    groups, page = keys.shape[1:3]
    heads = torch.arange(groups, device=q.device)[:, None]
    step = max(1, GATHER_BLOCK // (table.shape[1] * keys[0].numel()))
    out = []
    for start in range(0, len(q), step):  # few rows stay in cache
        rows = slice(start, start + step)
        longest = int(lengths[rows].max())
        index = (table[rows, None, : -(-longest // page)] * groups + heads).flatten()
        shape = (-1, groups, index.numel() // (groups * len(lengths[rows])) * page, q.shape[2])
        k, v = (
            x.flatten(0, 1).index_select(0, index).view(shape)[:, :, :longest]
            for x in (keys, values)
        )
        out.append(_decode_rows(q[rows], k, v, lengths[rows], window))
    return out[0] if len(out) == 1 else torch.cat(out)


def write_entries(
    keys: Tensor, values: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor
) -> None:
    """k [n, G, C] and v [n, G, Cv <= C] to pages and offsets [n] of [P, G, page, C]."""
    keys[pages, :, offsets] = k
    values[pages, :, offsets, : v.shape[-1]] = v


def _decode_rows(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    position = torch.arange(k.shape[2], device=k.device)[None, :]
    mask = position < lengths[:, None]
    if window is not None:
        mask = mask & (position >= lengths[:, None] - window)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, G, H / G, C]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None, :])
    return out.flatten(1, 2)


def sum_deterministic(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """[n, ...] -> [...]: summed in order in `wide`, rounded once."""
    total = parts[0].to(wide(parts.dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype) if out is None else out.copy_(total)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N]; gradients: `linear_input_grad`, `add_weight_grad_`."""
    return F.linear(x, weight, bias)


def linear_input_grad(dy: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """dy [T, N] @ weight [N, K], written to `out` where it is given."""
    return torch.mm(dy, weight, out=out)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 F] -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def count_rows(groups: Tensor, size: int, counted: Tensor | None = None) -> Tensor:
    """int64 [size], without bincount's host sync."""
    ones = torch.ones_like(groups) if counted is None else counted.to(groups.dtype)
    return torch.zeros(size, dtype=groups.dtype, device=groups.device).scatter_add_(0, groups, ones)


def sum_rows(x: Tensor, groups: Tensor, size: int) -> Tensor:
    """[size]: the sum of x [n] over each group."""
    return x.new_zeros(size).index_add(0, groups, x)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, D] @ weight [V, D].T, in new memory."""
    return x @ weight.T


def vocab_stats(z: Tensor, local_targets: Tensor, temperature: Tensor | None = None) -> Tensor:
    """[n, V] -> [n, 4] in `wide`: m = max z, s = sum e^d, u = sum d e^d, t = z at a local target or 0; d = (z - m) / temperature.

    Rows without columns or of -inf: m = -inf, s = u = 0.
    """
    n, columns = z.shape
    stats = torch.zeros((n, 4), dtype=wide(z.dtype), device=z.device)
    stats[:, 0] = float("-inf")
    if columns == 0:
        return stats
    local = (local_targets >= 0) & (local_targets < columns)
    picked = z.gather(-1, torch.where(local, local_targets, 0)[:, None])[:, 0].to(stats.dtype)
    stats[:, 3] = torch.where(local, picked, 0.0)
    for rows in row_blocks(z):
        peak = z[rows].amax(-1).to(stats.dtype)
        stats[rows, 0] = peak
        shifted = _shifted(
            z, rows, torch.where(peak == float("-inf"), 0.0, peak)[:, None], temperature
        )
        weights = shifted.exp()
        stats[rows, 1] = weights.sum(-1)
        # also of logits of -inf
        stats[rows, 2] = weights.mul_(shifted.clamp_(min=torch.finfo(stats.dtype).min / 2)).sum(-1)
    return stats


def vocab_grad_(
    z: Tensor,
    local_targets: Tensor,
    normalizer: tuple[Tensor, ...],
    g: Tensor,
    h: Tensor | None,
    temperature: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(g [j = y] - p (g + h (d - offset))) / temperature [n, V], in `dtype`; overwrites z.

    d = (z - peak) / temperature, p = e^d / total. g, h [n]: gradients of logprob and entropy.
    """
    _n, columns = z.shape
    if columns == 0:
        return z.to(dtype or z.dtype)
    local = (local_targets >= 0) & (local_targets < columns)
    index = torch.where(local, local_targets, 0)[:, None]
    at_target = torch.where(local, g, 0.0)[:, None]
    peak, total, offset = (stat[:, None] for stat in normalizer)
    by_logprob = -g[:, None] / total
    by_entropy = None if h is None else -h[:, None] / total
    for rows in row_blocks(z):
        shifted = _shifted(z, rows, peak[rows], temperature)
        if by_entropy is None:
            grad = shifted.exp_().mul_(by_logprob[rows])
        else:
            factor = (shifted - offset[rows]).clamp_(min=torch.finfo(shifted.dtype).min / 2)
            grad = shifted.exp_().mul_(factor.mul_(by_entropy[rows]).add_(by_logprob[rows]))
        grad.scatter_add_(-1, index[rows], at_target[rows])
        z[rows] = grad if temperature is None else grad.div_(temperature[rows, None])
    return z.to(dtype or z.dtype)


def _shifted(z: Tensor, rows: slice, peak: Tensor, temperature: Tensor | None) -> Tensor:
    block = z[rows].to(wide(z.dtype)) - peak
    return block if temperature is None else block.div_(temperature[rows, None])


def add_weight_grad_(total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None:
    """total [V, D] += dz [n, V].T @ x [n, D], also in a wider dtype. first: overwrite."""
    if total.dtype == x.dtype:
        torch.mm(dz.T, x, out=total) if first else total.addmm_(dz.T, x)
        return
    for rows in row_blocks(total):
        part = dz[:, rows].T @ x
        total[rows].copy_(part) if first else total[rows].add_(part)


def row_blocks(x: Tensor) -> Iterator[slice]:
    n, columns = x.shape
    step = max(1, (CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK) // columns)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
