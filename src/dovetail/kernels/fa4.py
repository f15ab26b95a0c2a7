"""Packed attention by FlashAttention-4 (the package flash-attn-4, extra `fa4`), on Hopper and Blackwell.

Its forward and backward pass are operations with names, shapes and an autograd formula of their own: a checkpoint can keep
what the forward one returns, and compilers need not look inside. Nothing of the package is imported before `usable` asks.

Sequences of one length, above all a single one, go in as a dense batch [B, n, heads, C]: no tile searches for its sequence,
and the longest tiles begin first. On an H200, forward + backward, 16 x 2048 takes 0.95 of the time of the same as a pack.

The package compiles a kernel for each form of its arguments. `compile_kernels` covers the forms that `attention` can ask for:
strides of 0, sequences of one tile and short dense batches never reach the package.
"""

import importlib
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import cuda, extras
from dovetail.kernels.reference import Spans

INTERFACE = "flash_attn.cute.interface"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))  # of queries and keys, and of values
FEW = 256  # queries of a sequence up to which the heads that share keys fill a tile together
LEAST = 512  # given as the longest length of a pack: a pack of single tiles would be another form
MANY = 257  # sequences of a pack from which on the package looks tiles up in a table, which is another form


def usable(device: torch.device) -> bool:
    """Whether the package is there, whole, and has kernels for this device."""
    return extras.usable(INTERFACE, "flash-attn-4", device)


def attention(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None) -> Tensor:
    """As `reference.attention`; other head dims and dtypes than FlashAttention-4's take torch's."""
    dims, shared = (q.shape[-1], v.shape[-1]), q.shape[1] != k.shape[1]
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
    """Whether all sequences are of one length, a long one."""
    return spans.longest > FEW and set(spans.lengths) == {spans.longest}


def _without_broadcast(x: Tensor) -> Tensor:
    """Strides of 0 are a form of their own."""
    return x.contiguous() if 0 in x.stride() else x


def compile_kernels(
    heads: tuple[int, int], dims: tuple[int, int], windowed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile what training may ask of `attention` with so many heads of queries and of keys, so that no step does.

    Kernels of an earlier process come from the disk where FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1.
    """
    if dtype not in cuda.FLASH_DTYPES or dims not in HEAD_DIMS:
        return
    packs = ([1, 8], [1, FEW + 1], [1] * MANY + [8], [1] * MANY + [FEW + 1], [FEW + 1])
    for window in (None, 4) if windowed else (None,):
        for lengths in packs:
            spans = Spans(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), tuple(lengths))
            shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
            q, k, v = (torch.zeros(sum(lengths), *shape, dtype=dtype, device=device) for shape in shapes)
            for x in (q, k, v):
                x.requires_grad_()
            attention(q, k, v, spans, spans, window).sum().backward()


@torch.library.custom_op("dovetail::fa4_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: list[Tensor],
    longest: list[int],
    window: int | None,
    deterministic: bool,  # noqa: ARG001 -- of the backward pass
) -> tuple[Tensor, Tensor]:
    """Outputs [Tq, H, Cv] and log-sum-exps [H, Tq] of bottom-right causal attention; `ends` and `longest` of q and of k.

    No ends: B sequences of `longest` tokens each, whose log-sum-exps are [B, H, n].
    """
    forward = importlib.import_module(INTERFACE)._flash_attn_fwd
    q, k, v = (x if ends else x.unflatten(0, (-1, n)) for x, n in zip((q, k, v), _each(longest), strict=True))
    packed = None if longest[0] <= FEW else False
    out, lse, *_ = forward(q, k, v, **_options(ends, longest, window), pack_gqa=packed, return_lse=True)
    return out if ends else out.flatten(0, 1), lse


@torch.library.custom_op("dovetail::fa4_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    results: list[Tensor],
    inputs: list[Tensor],
    ends: list[Tensor],
    longest: list[int],
    window: int | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from (q, k, v) and what the forward pass returned."""
    (out, lse), three, grad = results, inputs, _without_broadcast(grad)
    backward = importlib.import_module(INTERFACE)._flash_attn_bwd
    options = {**_options(ends, longest, window), "deterministic": deterministic}
    if not ends:
        three = [x.unflatten(0, (-1, n)) for x, n in zip(inputs, _each(longest), strict=True)]
        out, grad = (x.unflatten(0, (-1, longest[0])) for x in (out, grad))
    dq, dk, dv, *_ = backward(*three, out, grad, lse, **options)
    return (dq, dk, dv) if ends else (dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))


def _each(longest: list[int]) -> tuple[int, int, int]:
    """The longest sequence of q, of k and of v."""
    return longest[0], longest[1], longest[1]


def _options(ends: list[Tensor], longest: list[int], window: int | None) -> dict[str, Any]:
    """The arguments that both passes share."""
    found: dict[str, Any] = {
        "causal": True,
        "window_size_left": None if window is None else window - 1,
        "window_size_right": 0 if window is not None else None,
    }
    if ends:
        found |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
        found |= {"max_seqlen_q": max(longest[0], LEAST), "max_seqlen_k": max(longest[1], LEAST)}
    return found


@packed_attention.register_fake
def _shapes(q: Tensor, _k: Tensor, v: Tensor, ends: list[Tensor], longest: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _dim = q.shape
    rows = (heads, tokens) if ends else (tokens // longest[0], heads, longest[0])
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


@packed_attention_backward.register_fake
def _gradient_shapes(_grad: Tensor, _results: list[Tensor], inputs: list[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, *ends)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    out, lse, q, k, v, *ends = ctx.saved_tensors
    grads = packed_attention_backward(grad, [out, lse], [q, k, v], ends, *ctx.options)
    return (*grads, [None] * len(ends), None, None, None)


packed_attention.register_autograd(_backward, setup_context=_save)
