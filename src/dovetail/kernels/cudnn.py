"""Attention by cuDNN for sequences of one length: faster than torch's packed attention on Hopper, but it plans each new shape."""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from dovetail.kernels import cuda
from dovetail.kernels.reference import Spans

ARCHITECTURE = 9  # first major compute capability where it is faster than torch
MAX_HEAD_DIM = 128
LENGTH_STEP = 1024  # lengths that are likely to occur again
LONG = 16384  # tokens of a sequence that are worth a plan of their own


def attention(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None) -> Tensor:
    """As `reference.attention`; shapes not worth a plan take torch's packed attention."""
    n = q_spans.longest
    dense = n > 0 and set(q_spans.lengths) | set(k_spans.lengths) == {n}
    if not dense or (n % LENGTH_STEP and n < LONG) or (window is not None and window < n):
        return cuda.attention(q, k, v, q_spans, k_spans, window)
    queries, keys, values = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in (q, k, v))  # [B, heads, n, C]
    if not _supported(queries, keys, values):
        return cuda.attention(q, k, v, q_spans, k_spans, window)
    return causal(queries, keys, values).transpose(1, 2).flatten(0, 1)


def _supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Its backward pass is not deterministic."""
    if torch.are_deterministic_algorithms_enabled() or q.shape[-1] != v.shape[-1] or q.shape[-1] > MAX_HEAD_DIM:
        return False
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The op by name: torch's own choice between backends is a global setting."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
