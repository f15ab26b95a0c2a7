"""cuDNN attention for sequences of one length: faster than torch's on Hopper, but it plans each new shape."""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from dovetail.kernels import cuda
from dovetail.kernels.reference import Spans

ARCHITECTURE = 9  # first compute capability where it is faster
MAX_HEAD_DIM = 128
LENGTH_STEP = 1024
LONG = 16384  # lengths worth a plan


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None
) -> Tensor:
    """Other shapes, and deterministic backward passes, take `cuda.attention`."""
    n = q_spans.longest
    widths = (q.shape[-1], v.shape[-1])
    dense = (
        n > 0
        and set(q_spans.lengths) | set(k_spans.lengths) == {n}
        and (window is None or window >= n)
    )
    fits = (
        widths[0] == widths[1] <= MAX_HEAD_DIM and not torch.are_deterministic_algorithms_enabled()
    )
    if dense and fits and (n % LENGTH_STEP == 0 or n >= LONG):
        queries, keys, values = (
            x.unflatten(0, (-1, n)).transpose(1, 2) for x in (q, k, v)
        )  # [B, heads, n, C]
        shared = q.shape[1] != k.shape[1]
        if can_use_cudnn_attention(SDPAParams(queries, keys, values, None, 0.0, True, shared)):
            return causal(queries, keys, values).transpose(1, 2).flatten(0, 1)
    return cuda.attention(q, k, v, q_spans, k_spans, window)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Calls cuDNN by name: torch's choice of a backend is a global setting."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
