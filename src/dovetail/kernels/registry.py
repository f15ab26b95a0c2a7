"""Which implementation computes each op: chosen once from the device, then passed down as a value."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.kernels import cuda, cudnn, extras, fa4, quack, reference
from dovetail.kernels.extras import HOPPER
from dovetail.kernels.npu import NpuKernels

AttentionName = Literal["auto", "fa4", "cudnn", "torch"]


@dataclass(frozen=True)
class GatedProducts:
    """The products of a gated MLP with silu(gate) up inside them. What each computes: `quack`, by the same names."""

    takes: Callable[..., bool]
    gated_product_into: Callable[[Tensor, Tensor, Tensor], Tensor]
    gated: Callable[[Tensor, Tensor], Tensor]
    gated_gradient: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    input_gradient: Callable[..., Tensor]
    add_joint_grad_: Callable[..., None]
    add_weight_grad_: Callable[..., None]


@dataclass(frozen=True)
class HeadProducts:
    """A head's products, the first of which takes its rows' statistics by the way. What each computes: `quack_head`."""

    takes: Callable[..., bool]
    logit_stats: Callable[..., tuple[Tensor | None, Tensor]]
    logit_grads_: Callable[..., None]


@dataclass(frozen=True)
class KernelSet:
    """One implementation of every op of `reference`, how many tokens the head computes at a time, and, where there are any,
    products that gate inside or take statistics, and what draws tokens as `rollout.draw` does.
    """

    attention: Callable[..., Tensor] = reference.attention
    decode_attention: Callable[..., Tensor] = reference.decode_attention
    write_entries: Callable[..., None] = reference.write_entries
    rms_norm: Callable[..., Tensor] = reference.rms_norm
    add_norm: Callable[..., tuple[Tensor, Tensor]] = reference.add_norm
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference.heads
    rope: Callable[..., Tensor] = reference.rope
    linear: Callable[..., Tensor] = reference.linear
    linear_input_grad: Callable[..., Tensor] = reference.linear_input_grad
    swiglu: Callable[..., Tensor] = reference.swiglu
    sum_deterministic: Callable[..., Tensor] = reference.sum_deterministic
    copy_to_both: Callable[..., None] = reference.copy_to_both
    grouped_mm: Callable[..., Tensor] = reference.grouped_mm
    top_k: Callable[..., Tensor] = reference.top_k
    router_logits: Callable[..., Tensor] = reference.router_logits
    permute: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference.permute
    unpermute: Callable[..., Tensor] = reference.unpermute
    spread: Callable[..., Tensor] = reference.spread
    mixture: Callable[..., Tensor] = reference.mixture
    logits: Callable[..., Tensor] = reference.logits
    vocab_stats: Callable[..., Tensor] = reference.vocab_stats
    vocab_grad_: Callable[..., Tensor] = reference.vocab_grad_
    add_weight_grad_: Callable[..., None] = reference.add_weight_grad_
    head_chunk: int = 1024
    gated: GatedProducts | None = None
    head: HeadProducts | None = None
    draw: Callable[..., Tensor] | None = None

    def describe(self) -> dict[str, str]:
        """Op -> the module that computes it."""
        ops = {f.name: getattr(self, f.name) for f in fields(self)}
        ops |= {"gated": self.gated and self.gated.gated, "head": self.head and self.head.logit_stats}
        return {name: op.__module__.rpartition(".")[2] for name, op in ops.items() if callable(op)}


# What triton computes on a GPU, by the module of `kernels` that has it.
TRITON: Mapping[str, tuple[str, ...]] = {
    "logprob_triton": ("vocab_stats", "vocab_grad_"),
    "norm_triton": ("rms_norm", "add_norm", "swiglu", "sum_deterministic", "copy_to_both"),
    "rope_triton": ("heads", "rope"),
    "moe_triton": ("top_k", "permute", "unpermute", "spread"),
    "paged_attention_triton": ("decode_attention", "write_entries"),
    "sampling_triton": ("draw",),
}


def kernels_for(device: torch.device, attention: AttentionName = "auto") -> KernelSet:
    """The kernels of a device: the reference, with what the device does better put in its place.

    attention: of a CUDA device; auto takes the fastest that is installed.
    """
    if device.type == "cuda":
        return KernelSet(
            attention=_attention(device, attention),
            grouped_mm=cuda.grouped_mm,
            router_logits=cuda.router_logits,
            logits=cuda.logits,
            add_weight_grad_=cuda.add_weight_grad_,
            head_chunk=8192,
            **triton_kernels(),
            **(quack_kernels(device) if quack.usable(device) else {}),
        )
    if device.type == "npu":
        return npu_kernels(importlib.import_module("torch_npu"), device)
    return KernelSet()


def _attention(device: torch.device, name: AttentionName) -> Callable[..., Tensor]:
    """Packed attention of a CUDA device. What one cannot compute, or not well, it hands to the next: fa4 and cudnn to
    torch, torch to the reference.
    """
    if name in ("auto", "fa4") and fa4.usable(device):
        return fa4.attention
    if name == "fa4":
        raise ConfigError(
            "attention=fa4 needs flash-attn-4 and a Hopper or Blackwell GPU: pip install 'dovetail[fa4]', or choose auto"
        )
    if name == "torch" or (name == "auto" and torch.cuda.get_device_capability(device)[0] < cudnn.ARCHITECTURE):
        return cuda.attention
    return cudnn.attention


def gated_products() -> GatedProducts:
    """Those of `quack`."""
    return GatedProducts(**{f.name: getattr(quack, f.name) for f in fields(GatedProducts)})


def head_products() -> HeadProducts:
    """Those of `quack_head`, which needs triton."""
    head = importlib.import_module("dovetail.kernels.quack_head")
    return HeadProducts(**{f.name: getattr(head, f.name) for f in fields(HeadProducts)})


def quack_kernels(device: torch.device) -> dict[str, Any]:
    """What quack's products are for: gated MLPs and, where triton does the rest, mixtures of them and, on Hopper, the head."""
    if importlib.util.find_spec("triton") is None:
        return {"gated": gated_products()}
    mixture = importlib.import_module("dovetail.kernels.quack_moe").mixture
    hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
    head = head_products() if hopper and extras.usable(quack.EPILOGUE, "quack-kernels", device) else None
    return {"gated": gated_products(), "mixture": mixture, "head": head}


def triton_kernels() -> dict[str, Any]:
    """Op -> its kernel by triton, which CUDA builds of torch bring along; none without it."""
    if importlib.util.find_spec("triton") is None:
        return {}
    modules = {name: importlib.import_module(f"dovetail.kernels.{name}") for name in TRITON}
    return {op: getattr(modules[name], op) for name, ops in TRITON.items() for op in ops}


def npu_kernels(ops: Any, device: torch.device) -> KernelSet:
    """The kernels of an Ascend NPU, out of the operations of the module torch_npu."""
    npu = NpuKernels(ops, device)
    return KernelSet(
        attention=npu.attention,
        rms_norm=npu.rms_norm,
        add_norm=npu.add_norm,
        heads=npu.heads,
        rope=npu.rope,
        swiglu=npu.swiglu,
        grouped_mm=npu.grouped_mm,
        permute=npu.permute,
        unpermute=npu.unpermute,
        head_chunk=4096,
    )


# Dense bf16 operations per second by datasheet, by the start of the device's name.
PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
}
