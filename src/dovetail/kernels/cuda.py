"""What NVIDIA GPUs do differently from the reference: packed flash attention, grouped products, fp32 logits."""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels import reference
from dovetail.kernels.extras import ARCHITECTURES
from dovetail.kernels.reference import Spans

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_MULTIPLE, FLASH_LONGEST = 8, 256  # of head dims that flash attention takes
GROUPED_MULTIPLE = 8  # bf16 numbers in 16 bytes


def attention(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None) -> Tensor:
    """As `reference.attention`, by torch's packed flash attention in half precision; what that cannot do takes the reference.

    Deterministic where torch is told to be.
    """
    head_dim = q.shape[-1]
    if q.dtype not in FLASH_DTYPES or head_dim % FLASH_MULTIPLE or head_dim > FLASH_LONGEST:
        return reference.attention(q, k, v, q_spans, k_spans, window)
    narrow = v.shape[-1]
    left = -1 if window is None or window >= k_spans.longest else window - 1
    out = _packed()(
        q,
        k,
        v if narrow == head_dim else reference.as_wide_as(k, v),
        q_spans.cu_seqlens,
        k_spans.cu_seqlens,
        q_spans.longest,
        k_spans.longest,
        window_size=(left, 0),
    )
    assert isinstance(out, Tensor)
    return out[..., :narrow]


@cache
def _packed() -> Callable[..., Any]:
    """torch's, which shares KV heads. Its module brings torch's compiler along, which takes longer to import than all of ours."""
    found: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 shares KV heads without being asked; later ones ask for a flag that it does not know.
    return partial(found, enable_gqa=True) if "enable_gqa" in inspect.signature(found).parameters else found


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """As `reference.grouped_mm`, in one launch where rows are whole multiples of 16 bytes, and without asking the host."""
    if x.dtype != torch.bfloat16 or not len(x) or any(n % GROUPED_MULTIPLE for n in weight.shape[1:]):
        return reference.grouped_mm(x, weight, offsets)
    return F.grouped_mm(x, weight, offs=offsets.to(torch.int32))


def grouped_stays(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether `grouped_mm` of these widths asks the host for nothing: elsewhere torch reads where experts' rows end."""
    fits = dtype == torch.bfloat16 and not any(n % GROUPED_MULTIPLE for n in widths)
    return fits and torch.cuda.get_device_capability(device)[0] in ARCHITECTURES


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.logits`, keeping the product's fp32 accumulator."""
    if x.dtype in FLASH_DTYPES:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return reference.logits(x, weight)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.router_logits`, without float32 copies: products of two bfloat16 numbers are exact in float32."""
    if x.dtype != torch.bfloat16 or weight.dtype != x.dtype or not len(x):
        return reference.router_logits(x, weight)
    z: Tensor = _RouterLogits.apply(x, weight)
    return z


class _RouterLogits(torch.autograd.Function):
    """forward: z = x w.T in float32. backward: dx = dz w, dw = dz.T x, where dz = its bfloat16 + what that leaves.

    Two bfloat16 numbers carry 16 of dz's 24 bits, so both products err by 2^-17 before they are rounded themselves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dz,), (x, weight) = grads, ctx.saved_tensors
        parts = two_parts(dz, x.dtype)  # [t, 2 E]
        dw = torch.mm(parts.T, x, out_dtype=torch.float32)
        return parts @ torch.cat((weight, weight)), (dw[: len(weight)] + dw[len(weight) :]).to(weight.dtype)


def two_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, E] -> [n, 2 E] in a narrower dtype: x rounded, and beside it the rounded rest."""
    first = x.to(dtype)
    return torch.cat((first, (x - first).to(dtype)), dim=-1)


def add_weight_grad_(total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None:
    """As `reference.add_weight_grad_`: the product itself adds, half-precision ones in fp32."""
    wider: dict[str, Any] = {} if total.dtype == x.dtype else {"out_dtype": total.dtype}
    if first:
        torch.mm(dz.T, x, **wider, out=total)
    else:
        torch.addmm(total, dz.T, x, **wider, out=total)
