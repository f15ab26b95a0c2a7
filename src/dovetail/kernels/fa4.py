"""Packed attention by FlashAttention-4 (the package flash-attn-4, extra `fa4`), on Hopper and Blackwell.

Its forward and backward pass are operations with names, shapes and an autograd formula of their own: a checkpoint can keep
what the forward one returns, and compilers need not look inside. Nothing of the package is imported before `usable` asks.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import cuda, extras
from dovetail.kernels.reference import Spans

INTERFACE = "flash_attn.cute.interface"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))  # of queries and keys, and of values


def usable(device: torch.device) -> bool:
    """Whether the package is there, whole, and has kernels for this device."""
    return extras.usable(INTERFACE, "flash-attn-4", device)


def attention(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None) -> Tensor:
    """As `reference.attention`; other head dims and dtypes than FlashAttention-4's take torch's."""
    dims, shared = (q.shape[-1], v.shape[-1]), q.shape[1] != k.shape[1]
    if q.dtype not in cuda.FLASH_DTYPES or dims not in HEAD_DIMS or (shared and dims[0] != dims[1]):
        return cuda.attention(q, k, v, q_spans, k_spans, window)
    out, _lse = packed_attention(
        q,
        k,
        v,
        [q_spans.cu_seqlens, k_spans.cu_seqlens],
        [q_spans.longest, k_spans.longest],
        None if window is None or window >= k_spans.longest else window,
        torch.are_deterministic_algorithms_enabled(),
    )
    return out


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
    """Outputs [Tq, H, Cv] and log-sum-exps [H, Tq] of bottom-right causal attention; `ends` and `longest` of q and of k."""
    forward = importlib.import_module(INTERFACE)._flash_attn_fwd
    out, lse, *_ = forward(q, k, v, **_options(ends, longest, window), return_lse=True)
    return out, lse


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
    (out, lse), (q, k, v) = results, inputs
    backward = importlib.import_module(INTERFACE)._flash_attn_bwd
    options = {**_options(ends, longest, window), "deterministic": deterministic}
    dq, dk, dv, *_ = backward(q, k, v, out, grad, lse, **options)
    return dq, dk, dv


def _options(ends: list[Tensor], longest: list[int], window: int | None) -> dict[str, Any]:
    """The arguments that both passes share."""
    return {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "causal": True,
        "window_size_left": None if window is None else window - 1,
        "window_size_right": 0 if window is not None else None,
    }


@packed_attention.register_fake
def _shapes(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _dim = q.shape
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(heads, tokens, dtype=torch.float32)


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
