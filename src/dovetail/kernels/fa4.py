"""Packed attention by FlashAttention-4 (flash-attn-4, extra `fa4`), which compiles a kernel for each form of its arguments."""

import importlib
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import cuda
from dovetail.kernels.reference import Spans

INTERFACE = "flash_attn.cute.interface"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))  # of q and k, and of v
PACK_GQA_QUERIES = 256  # up to this length the package packs the heads of a KV head
MIN_MAX_SEQLEN = 512  # at least: shorter packs would be another form
MANY_SEQUENCES = 257  # the package changes its form here


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None
) -> Tensor:
    """Other head dims and dtypes take `cuda.attention`."""
    dims = (q.shape[-1], v.shape[-1])
    shared = q.shape[1] != k.shape[1]
    if q.dtype not in cuda.FLASH_DTYPES or dims not in HEAD_DIMS or (shared and dims[0] != dims[1]):
        return cuda.attention(q, k, v, q_spans, k_spans, window)
    out, _lse = packed_attention(
        *map(_without_broadcast, (q, k, v)),
        [] if _dense(q_spans) and _dense(k_spans) else [q_spans.cu_seqlens, k_spans.cu_seqlens],
        [q_spans.longest, k_spans.longest],
        None if window is None or window >= k_spans.longest else window,
        torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _dense(spans: Spans) -> bool:
    return spans.longest > PACK_GQA_QUERIES and set(spans.lengths) == {spans.longest}


def _without_broadcast(x: Tensor) -> Tensor:
    """Strides of 0 would be another form."""
    return x.contiguous() if 0 in x.stride() else x


def compile_kernels(
    heads: tuple[int, int],
    dims: tuple[int, int],
    windowed: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compile every form of `attention`. heads: of queries, of keys."""
    if dtype not in cuda.FLASH_DTYPES or dims not in HEAD_DIMS:
        return
    short = 8
    long = PACK_GQA_QUERIES + 1
    packs = (
        [1, short],
        [1, long],
        [1] * MANY_SEQUENCES + [short],
        [1] * MANY_SEQUENCES + [long],
        [long],
    )
    for window in (None, 4) if windowed else (None,):
        for lengths in packs:
            spans = Spans(
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
                tuple(lengths),
            )
            shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
            options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
            q, k, v = (torch.zeros(sum(lengths), *shape, **options) for shape in shapes)
            attention(q, k, v, spans, spans, window).sum().backward()


@torch.library.custom_op("dovetail::fa4_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[Tensor],
    max_seqlens: list[int],
    window: int | None,
    deterministic: bool,  # noqa: ARG001 -- of the backward pass
) -> tuple[Tensor, Tensor]:
    """Outputs [Tq, H, Cv] and log-sum-exps [H, Tq], or [B, H, n] without cu_seqlens."""
    forward = importlib.import_module(INTERFACE)._flash_attn_fwd
    if not cu_seqlens:
        q, k, v = _as_batch((q, k, v), max_seqlens)
    pack_gqa = None if max_seqlens[0] <= PACK_GQA_QUERIES else False
    out, lse, *_ = forward(
        q, k, v, **_options(cu_seqlens, max_seqlens, window), pack_gqa=pack_gqa, return_lse=True
    )
    return out if cu_seqlens else out.flatten(0, 1), lse


@torch.library.custom_op("dovetail::fa4_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    results: list[Tensor],
    inputs: list[Tensor],
    cu_seqlens: list[Tensor],
    max_seqlens: list[int],
    window: int | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (out, lse) = results
    (q, k, v) = inputs
    grad = _without_broadcast(grad)
    backward = importlib.import_module(INTERFACE)._flash_attn_bwd
    if not cu_seqlens:
        q, k, v = _as_batch((q, k, v), max_seqlens)
        out, grad = (x.unflatten(0, (-1, max_seqlens[0])) for x in (out, grad))
    options = _options(cu_seqlens, max_seqlens, window)
    dq, dk, dv, *_ = backward(q, k, v, out, grad, lse, **options, deterministic=deterministic)
    return (dq, dk, dv) if cu_seqlens else (dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))


def _as_batch(qkv: tuple[Tensor, Tensor, Tensor], max_seqlens: list[int]) -> list[Tensor]:
    n, m = max_seqlens
    return [x.unflatten(0, (-1, length)) for x, length in zip(qkv, (n, m, m), strict=True)]


def _options(
    cu_seqlens: list[Tensor], max_seqlens: list[int], window: int | None
) -> dict[str, Any]:
    left, right = (None, None) if window is None else (window - 1, 0)
    options: dict[str, Any] = {"causal": True, "window_size_left": left, "window_size_right": right}
    for name, ends, longest in zip("qk", cu_seqlens, max_seqlens, strict=False):
        options |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": max(longest, MIN_MAX_SEQLEN)}
    return options


@packed_attention.register_fake
def _fake(
    q: Tensor, _k: Tensor, v: Tensor, cu_seqlens: list[Tensor], max_seqlens: list[int], *_: Any
) -> Any:
    (tokens, heads, _dim) = q.shape
    n = max_seqlens[0]
    lse_shape = (heads, tokens) if cu_seqlens else (tokens // n, heads, n)
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(lse_shape, dtype=torch.float32)


@packed_attention_backward.register_fake
def _fake_backward(
    _grad: Tensor, _results: list[Tensor], inputs: list[Tensor], *_: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, *cu_seqlens)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    out, lse, q, k, v, *cu_seqlens = ctx.saved_tensors
    grads = packed_attention_backward(grad, [out, lse], [q, k, v], cu_seqlens, *ctx.options)
    return (*grads, [None] * len(cu_seqlens), None, None, None)


packed_attention.register_autograd(_backward, setup_context=_setup_context)
