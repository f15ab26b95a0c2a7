"""Attention by cuDNN where sequences are equally long: one document, or a dense batch. It beats torch's packed attention
by far on Hopper, but plans every new shape anew, and its backward pass is not deterministic.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from dovetail.kernels import cuda
from dovetail.kernels.reference import Spans

ARCHITECTURE = 9  # major compute capability from which on it is faster than torch
LARGEST_HEAD = 128
STEP = 1024  # of lengths that are likely to come again
LONG = 16384  # tokens of a sequence that pays for a plan at once


def attention(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None) -> Tensor:
    """As `reference.attention`; what is not worth a plan of cuDNN's takes torch's packed attention."""
    n = q_spans.longest
    if not _dense(q_spans, k_spans) or (n % STEP and n < LONG) or (window is not None and window < n):
        return cuda.attention(q, k, v, q_spans, k_spans, window)
    rows, keys, values = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in (q, k, v))  # [B, heads, n, C]
    if not _can(rows, keys, values):
        return cuda.attention(q, k, v, q_spans, k_spans, window)
    return causal(rows, keys, values).transpose(1, 2).flatten(0, 1)


def _dense(q_spans: Spans, k_spans: Spans) -> bool:
    """Whether there are tokens, and each sequence has the same number of queries and of keys."""
    return q_spans.longest > 0 and set(q_spans.lengths) | set(k_spans.lengths) == {q_spans.longest}


def _can(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes it, forward and backward, as it is asked to."""
    if torch.are_deterministic_algorithms_enabled() or q.shape[-1] != v.shape[-1] or q.shape[-1] > LARGEST_HEAD:
        return False
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operation itself, asked for by name, since which one torch would choose is a global setting."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
    return out
