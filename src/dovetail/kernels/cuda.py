"""NVIDIA GPUs by torch: packed flash attention, grouped products, fp32 logits."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels import reference, reference_experts
from dovetail.kernels.reference import Spans

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_MULTIPLE = 8
FLASH_MAX_HEAD = 256
GROUPED_MULTIPLE = 8  # bf16 in 16 bytes
HOPPER = 9
ARCHITECTURES = (HOPPER, 10)  # of the extra `fa4`


def package_usable(interface: str, device: torch.device) -> bool:
    """Whether the module loads on a Hopper or Blackwell GPU. Warns if it is installed but broken."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in ARCHITECTURES:
        return False
    try:
        importlib.import_module(interface)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(interface.partition(".")[0]):
            problem = f"{interface} lacks {error.name}: pip install 'dovetail-rl[fa4]'; going on without it"
            warnings.warn(problem, stacklevel=3)
        return False
    except (ImportError, OSError) as error:
        warnings.warn(f"{interface} does not load ({error}); going on without it", stacklevel=3)
        return False
    return True


def takes_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention reads lengths on the device alone, as a CUDA graph needs it."""
    return dtype in FLASH_DTYPES and head_dim % FLASH_MULTIPLE == 0 and head_dim <= FLASH_MAX_HEAD


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None
) -> Tensor:
    if not takes_flash(q.dtype, q.shape[-1]):
        return reference.attention(q, k, v, q_spans, k_spans, window)
    left = -1 if window is None or window >= k_spans.longest else window - 1
    spans = (q_spans.cu_seqlens, k_spans.cu_seqlens, q_spans.longest, k_spans.longest)
    out = _varlen_attention()(q, k, reference.pad_values(k, v), *spans, window_size=(left, 0))
    return out[..., : v.shape[-1]]


@cache
def _varlen_attention() -> Callable[..., Any]:
    """Its module imports torch's compiler, which is slow."""
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # not in torch 2.11, which shares KV heads by default
    gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if gqa else varlen_attn


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One launch without a host sync, for rows of multiples of 16 bytes."""
    if (
        x.dtype != torch.bfloat16
        or not len(x)
        or any(n % GROUPED_MULTIPLE for n in weight.shape[1:])
    ):
        return reference_experts.grouped_mm(x, weight, offsets)
    return F.grouped_mm(x, weight, offs=offsets.to(torch.int32))


def grouped_mm_without_sync(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether `grouped_mm` of these widths needs no host sync."""
    fits = dtype == torch.bfloat16 and not any(n % GROUPED_MULTIPLE for n in widths)
    return fits and torch.cuda.get_device_capability(device)[0] in ARCHITECTURES


def logits(x: Tensor, weight: Tensor) -> Tensor:
    half = x.dtype in FLASH_DTYPES
    return torch.mm(x, weight.T, out_dtype=torch.float32) if half else reference.logits(x, weight)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Without float32 copies: bfloat16 products are exact in float32."""
    if x.dtype != torch.bfloat16 or weight.dtype != x.dtype or not len(x):
        return reference_experts.router_logits(x, weight)
    return _RouterLogits.apply(x, weight)


class _RouterLogits(torch.autograd.Function):
    """forward: z = x w.T in float32. backward: dx = dz w, dw = dz.T x; dz as a sum of two bfloat16 numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dz,) = grads
        (x, weight) = ctx.saved_tensors
        high = dz.to(x.dtype)
        parts = torch.cat((high, (dz - high).to(x.dtype)), dim=-1)  # [t, 2 E]
        dw = torch.mm(parts.T, x, out_dtype=torch.float32)
        return parts @ torch.cat((weight, weight)), (dw[: len(weight)] + dw[len(weight) :]).to(
            weight.dtype
        )


def add_weight_grad_(total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None:
    wider: dict[str, Any] = {} if total.dtype == x.dtype else {"out_dtype": total.dtype}
    if first:
        torch.mm(dz.T, x, **wider, out=total)
    else:
        torch.addmm(total, dz.T, x, **wider, out=total)
