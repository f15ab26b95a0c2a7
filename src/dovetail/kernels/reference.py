"""The plain-torch definition of every op: the meaning of all other implementations, and what runs on a CPU.

T packed tokens, H query heads, G KV heads, C head dim, V this rank's vocabulary columns. Nothing of size T x T or
(elementwise temporaries) of size T x V is ever made.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels.token_permute import Collect, Spread, count_rows, inverse_of

SHORT = 128  # tokens of a sequence up to which a CPU is faster without flash attention in half precision
QUERY_BLOCK = 256  # queries that share one attention mask, where a mask is needed
CPU_BLOCK = 1 << 20  # logits that one elementwise pass touches: a core's cache
GPU_BLOCK = 1 << 27  # enough of them to fill a GPU
GATHERED = 1 << 19  # numbers of cached keys that are gathered at a time
LONGEST_PAGED = 256  # channels up to which others compute attention to a paged cache


@dataclass(frozen=True)
class Spans:
    """Where packed sequences lie: `cu_seqlens` int32 [S + 1] on the device, the lengths also on the host."""

    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and exponentials: float32, or float64 where the model itself is."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """`x` in the dtype for sums and exponentials."""
    return x.to(wide(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim; the root mean square in `wide`, the product in x's dtype."""
    y = widened(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, or x alone, and its `rms_norm`: what goes on beside a block's part, and what goes into it."""
    total = x if y is None else x + y
    return total, rms_norm(total, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads x [T, H, C] by their tokens' angles, cos and sin [T, R / 2]: channel i with i + R / 2; the rest stay."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
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
    turn: Callable[..., Tensor] = rope,
) -> tuple[Tensor, Tensor, Tensor]:
    """The joint product [T, (H + 2 G) C] cut into q [T, H, C], k and v [T, G, C]; q and k turned as by `rope`.

    counts: H and G. gains [C] of q and of k: both go through `rms_norm` first. norm, turn: a device's own.
    """
    queries, groups = counts
    q, k, v = qkv.unflatten(-1, (queries + 2 * groups, -1)).split((queries, groups, groups), dim=1)
    if gains is not None:
        q, k = norm(q, gains[0], eps), norm(k, gains[1], eps)
    return turn(q, cos, sin), turn(k, cos, sin), v


def attention(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None) -> Tensor:
    """Causal attention inside each packed sequence: q [Tq, H, C], k [Tk, G, C], v [Tk, G, Cv <= C] -> [Tq, H, Cv].

    Where a sequence has fewer queries than keys, they are its last ones (bottom-right causal). With a window, a query
    sees that many latest keys, itself included. Scores are scaled by C^-1/2.
    """
    if (narrow := v.shape[-1]) < q.shape[-1]:
        return attention(q, k, as_wide_as(k, v), q_spans, k_spans, window)[..., :narrow]
    out = []
    for count, n, m, at_q, at_k in _runs(q_spans.lengths, k_spans.lengths):
        rows = q[at_q : at_q + count * n].unflatten(0, (count, n)).transpose(1, 2)  # [B, H, n, C]
        keys = k[at_k : at_k + count * m].unflatten(0, (count, m)).transpose(1, 2)
        values = v[at_k : at_k + count * m].unflatten(0, (count, m)).transpose(1, 2)
        if n == m and (window is None or m <= window):
            mixed = _causal_attention(rows, keys, values)
        else:
            mixed = _masked_attention(rows, keys, values, window)
        out.append(mixed.transpose(1, 2).flatten(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


def as_wide_as(k: Tensor, v: Tensor) -> Tensor:
    """Values with as many channels as keys have, the new ones zeros: so are those of what attention makes of them."""
    return v if v.shape[-1] == k.shape[-1] else F.pad(v, (0, k.shape[-1] - v.shape[-1]))


def _runs(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of neighboring sequences of equal lengths: (how many, queries each, keys each, first query, first key)."""
    at_q = at_k = 0
    for (n, m), run in itertools.groupby(zip(q_lengths, k_lengths, strict=True)):
        count = len(list(run))
        if n:
            yield count, n, m, at_q, at_k
        at_q, at_k = at_q + count * n, at_k + count * m


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [B, H, n, C] on [B, G, n, C]."""
    n = q.shape[2]
    if n > SHORT or q.dtype in (torch.float32, torch.float64):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    grouped = q.reshape(-1, k.shape[1], q.shape[1] // k.shape[1] * n, q.shape[3])  # [B, G, H / G n, C]
    scores = (grouped @ k.transpose(2, 3)).to(torch.float32).mul_(q.shape[3] ** -0.5).unflatten(2, (-1, n))
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(q.dtype)
    return (weights.flatten(2, 3) @ v).view(q.shape)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Bottom-right causal attention of [B, H, n, C] on [B, G, m, C], by blocks of queries and only the keys they see."""
    n, m = q.shape[2], k.shape[2]
    blocks = []
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        first, last = start + m - n, stop + m - n  # positions of this block's queries among the keys
        low = 0 if window is None else max(0, first - window + 1)
        at_q = torch.arange(first, last, device=q.device)[:, None]
        at_k = torch.arange(low, last, device=q.device)[None, :]
        mask = at_k <= at_q if window is None else (at_k <= at_q) & (at_k > at_q - window)
        blocks.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, low:last],
                v[:, :, low:last],
                attn_mask=mask,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(blocks, dim=2)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, window: int | None = None
) -> Tensor:
    """One new token a row on its cache: q [B, H, C], keys and values [P, G, page, C] -> [B, H, C].

    Row b's `lengths[b]` entries, in order, fill the pages table[b] [W]. They are gathered for some rows at a time, so that
    they stay in a core's cache until they are used.
    """
    groups, page = keys.shape[1:3]
    heads = torch.arange(groups, device=q.device)[:, None]
    step = max(1, GATHERED // (table.shape[1] * keys[0].numel()))
    out = []
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        longest = int(lengths[rows].max())
        where = (table[rows, None, : -(-longest // page)] * groups + heads).flatten()
        shape = (-1, groups, where.numel() // (groups * len(lengths[rows])) * page, q.shape[2])
        k, v = (x.flatten(0, 1).index_select(0, where).view(shape)[:, :, :longest] for x in (keys, values))
        out.append(_decode_rows(q[rows], k, v, lengths[rows], window))
    return out[0] if len(out) == 1 else torch.cat(out)


def write_entries(keys: Tensor, values: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """New tokens' k [n, G, C] and v [n, G, Cv <= C] into keys and values [P, G, page, C], at pages and offsets [n]."""
    keys[pages, :, offsets] = k
    values[pages, :, offsets, : v.shape[-1]] = v


def _decode_rows(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """q [B, H, C] on k and v [B, G, N, C], of which row b holds `lengths[b]`."""
    at = torch.arange(k.shape[2], device=k.device)[None, :]
    mask = at < lengths[:, None]
    if window is not None:
        mask = mask & (at >= lengths[:, None] - window)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, G, H / G, C]: the queries of a group share their keys
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None, :])
    return out.flatten(1, 2)


def sum_deterministic(parts: Tensor, out: Tensor | None = None, own: tuple[int, Tensor] | None = None) -> Tensor:
    """[n, ...] -> [...]: the first part and the others added to it one after another, in `wide`; rounded once.

    out: dense memory for the result. own: which part is not read, and a dense one in its place.
    """
    each = list(parts)
    if own is not None:
        each[own[0]] = own[1]
    total = each[0].to(wide(parts.dtype), copy=True)
    for part in each[1:]:
        total += part
    return total.to(parts.dtype) if out is None else out.copy_(total)


def copy_to_both(x: Tensor, first: Tensor, second: Tensor) -> None:
    """Copy x to both; all three are dense, and alike."""
    first.copy_(x)
    second.copy_(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N]. Its gradients are `linear_input_grad` and `add_weight_grad_`."""
    return F.linear(x, weight, bias)


def linear_input_grad(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `linear`'s input: dy [T, N] @ weight [N, K]."""
    return dy @ weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of the joint product [T, 2 F] -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's product of its own tokens: x [T, K], weight [E, K, N], offsets int [E] -> [T, N].

    Tokens are sorted by expert; expert e's end at `offsets[e]`. One may have none: the gradient of its weight is 0.
    """
    ends = offsets.tolist()
    assert ends[-1] == len(x), f"the last expert's tokens end at {ends[-1]} of {len(x)}"
    lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
    return torch.cat([rows @ w for rows, w in zip(x.split(lengths), weight.unbind(), strict=True)])


def permute(x: Tensor, experts: Tensor, count: int, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of each token for each of its experts, by expert: x [T, D], experts int [T, K].

    -> [T K, D], rows int [T K], ends int [count]. rows[t K + i]: where the copy of token t for its i-th expert is. Within an
    expert the copies are in the tokens' order; expert e's end at ends[e].

    total: experts of `count` or more are nowhere. They get no copy, and in `rows` a number that no row has; the result has
    `total` rows, and where there are fewer copies nobody may read the last ones. Without a total all are somewhere.
    """
    each = experts.flatten().clamp(max=count)
    rows = inverse_of(each.argsort(stable=True)).masked_fill_(each == count, len(each))
    ends = count_rows(each, count + 1)[:count].cumsum(0)
    return spread(x, rows, experts.shape[1], total), rows, ends


def spread(x: Tensor, rows: Tensor, copies: int, total: int | None = None) -> Tensor:
    """The first that `permute` returns, of other numbers [T, N] of the same tokens, given its `rows`. Deterministic."""
    found: Tensor = Spread.apply(x, rows, copies, total)
    return found


def unpermute(x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum of a token's copies: x [n, D], rows int [T K] as `permute` returns, weights [T, K] -> [T, D]; without
    weights, rows [T, K], a plain sum. Deterministic."""
    copies = Collect.apply(x, rows.flatten())
    if weights is None:
        return copies.unflatten(0, rows.shape).sum(1)
    if len(x) < rows.numel():
        weights = weights.masked_fill((rows >= len(x)).view(weights.shape), 0)
    return torch.bmm(weights.to(x.dtype)[:, None], copies.unflatten(0, weights.shape))[:, 0]


def mixture(
    ops: Any,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: tuple[Tensor, Tensor],
    copies: int | None = None,
    _add: Callable[..., None] | None = None,
) -> Tensor:
    """Each token's weighted sum over its experts, x [n, D] -> [n, D]: down_e(swiglu(gate_up_e x)) for each e of chosen.

    chosen int [n, K], weights [n, K] in `wide`; the experts': gate_up [E, 2 F, D] and down [E, D, F]. copies: how many
    of `chosen` are below E; the others are nowhere: they cost nothing and add nothing, and the gradient of their weight
    is 0. Without it all are. ops: the kernels that the parts are computed by. add: takes the gradient of "gate_up_proj" or
    "down_proj", which autograd then does not get, as what it is a product of and what adds that (`GradAccumulator.defer_wgrad`).
    """
    gate_up, down = experts
    rows, places, ends = ops.permute(x, chosen, len(gate_up), copies)
    hidden = ops.swiglu(ops.grouped_mm(rows, gate_up.transpose(1, 2), ends))
    found: Tensor = ops.unpermute(ops.grouped_mm(hidden, down.transpose(1, 2), ends), places, weights)
    return found


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 [t, k]: the columns of each row's k highest scores [t, E], best first; none twice."""
    return scores.topk(k).indices


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, D] @ weight [E, D].T in `wide`, differentiable."""
    return F.linear(widened(x), widened(weight))


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, D] @ weight [V, D].T, as exact as the device's product allows: fresh memory that callers may overwrite."""
    return x @ weight.T


def vocab_stats(z: Tensor, local_targets: Tensor, temperature: Tensor | None = None) -> Tensor:
    """[n, V] logits -> [n, 4] in `wide`: m = max z, s = sum e^d, u = sum d e^d, t = z at the target; d = (z - m) / temperature.

    `local_targets` [n] are this rank's columns; one outside [0, V) belongs to another rank and gives t = 0. Without columns
    (V = 0), and for rows that are -inf throughout, the row adds nothing to a combination: m = -inf, s = u = 0.
    """
    n, columns = z.shape
    stats = torch.zeros((n, 4), dtype=wide(z.dtype), device=z.device)
    stats[:, 0] = float("-inf")
    if columns == 0:
        return stats
    mine = (local_targets >= 0) & (local_targets < columns)
    picked = z.gather(-1, torch.where(mine, local_targets, 0)[:, None])[:, 0].to(stats.dtype)
    stats[:, 3] = torch.where(mine, picked, 0.0)
    for rows in _row_blocks(z):
        peak = z[rows].amax(-1).to(stats.dtype)
        stats[rows, 0] = peak
        shifted = _shifted(z, rows, torch.where(peak == float("-inf"), 0.0, peak)[:, None], temperature)
        weights = shifted.exp()
        stats[rows, 1] = weights.sum(-1)
        # e^-inf (-inf) is 0 here: a column that cannot occur carries no entropy
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
    """Turn logits [n, V] into their gradient (g [j = y] - p (g + h (d - offset))) / temperature.

    d = (z - peak) / temperature and p = e^d / total, with the peak, total and offset [n] of the whole vocabulary in `normalizer`
    (`tokenstats.Normalizer`). `g` and `h` [n] are the gradients of logprob and entropy; h = None where nothing asks for the
    entropy's. Computed in `wide`, returned in `dtype`; without one, in z itself. z's memory is spent in either case, and the
    result may lie in it.
    """
    _n, columns = z.shape
    if columns == 0:
        return z.to(dtype or z.dtype)
    mine = (local_targets >= 0) & (local_targets < columns)
    index, at_target = torch.where(mine, local_targets, 0)[:, None], torch.where(mine, g, 0.0)[:, None]
    peak, total, offset = (each[:, None] for each in normalizer)
    by_logprob, by_entropy = -g[:, None] / total, None if h is None else -h[:, None] / total
    for rows in _row_blocks(z):
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
    """(z - peak) / temperature of some rows of the logits, in `wide`: new memory. peak [rows, 1], temperature [n]."""
    block = z[rows].to(wide(z.dtype)) - peak
    return block if temperature is None else block.div_(temperature[rows, None])


def add_weight_grad_(total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None:
    """total [V, D] += dz [n, V].T @ x [n, D], where total may be wider than dz and x. The first one finds nothing there."""
    if total.dtype == x.dtype:
        torch.mm(dz.T, x, out=total) if first else total.addmm_(dz.T, x)
        return
    for rows in _row_blocks(total):
        part = dz[:, rows].T @ x
        total[rows].copy_(part) if first else total[rows].add_(part)


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows that cover x [n, columns], each of a bounded number of elements."""
    n, columns = x.shape
    step = max(1, (CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK) // columns)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
