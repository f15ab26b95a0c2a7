"""Which implementation computes each op, chosen once per device."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.kernels import cuda, cudnn, fa4, quack, reference
from dovetail.kernels.npu import NpuKernels

AttentionName = Literal["auto", "fa4", "cudnn", "torch"]


@dataclass(frozen=True)
class GatedProducts:
    """The products of a gated MLP with SwiGLU in their epilogue, as `quack` documents them."""

    takes: Callable[..., bool] = quack.takes
    gated_product_into: Callable[[Tensor, Tensor, Tensor], Tensor] = quack.gated_product_into
    gated: Callable[[Tensor, Tensor], Tensor] = quack.gated
    gated_gradient: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = quack.gated_gradient
    input_gradient: Callable[..., Tensor] = quack.input_gradient
    add_joint_grad_: Callable[..., None] = quack.add_joint_grad_
    add_weight_grad_: Callable[..., None] = quack.add_weight_grad_


@dataclass(frozen=True)
class HeadProducts:
    """The products of the LM head with row statistics in the epilogue, as `quack_head` documents them."""

    takes: Callable[..., bool]
    logit_stats: Callable[..., tuple[Tensor | None, Tensor]]
    logit_grads_: Callable[..., None]


@dataclass(frozen=True)
class KernelSet:
    """An implementation of every op of `reference`, and fused ones, or None:

    mixture: of `mixture_of_experts`; returns None for unsupported inputs. gated, head: products. draw: plain sampling.
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
    grouped_mm: Callable[..., Tensor] = reference.grouped_mm
    top_k: Callable[..., Tensor] = reference.top_k
    router_logits: Callable[..., Tensor] = reference.router_logits
    permute: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference.permute
    permute_tokens: Callable[..., Tensor] = reference.permute_tokens
    unpermute: Callable[..., Tensor] = reference.unpermute
    logits: Callable[..., Tensor] = reference.logits
    vocab_stats: Callable[..., Tensor] = reference.vocab_stats
    vocab_grad_: Callable[..., Tensor] = reference.vocab_grad_
    add_weight_grad_: Callable[..., None] = reference.add_weight_grad_
    head_chunk: int = 1024  # tokens per chunk of the LM head
    mixture: Callable[..., Tensor | None] | None = None
    gated: GatedProducts | None = None
    head: HeadProducts | None = None
    draw: Callable[..., Tensor] | None = None

    def describe(self) -> dict[str, str]:
        """Op -> the module that computes it."""
        ops = {f.name: getattr(self, f.name) for f in fields(self)}
        ops |= {"gated": self.gated and self.gated.gated, "head": self.head and self.head.logit_stats}
        return {name: op.__module__.rpartition(".")[2] for name, op in ops.items() if callable(op)}


def mixture_of_experts(
    kernels: KernelSet,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    matrices: tuple[Tensor, Tensor],
    copies: int | None = None,
    add: Callable[..., None] | None = None,
) -> Tensor:
    """Each token's weighted sum over its experts, x [n, D] -> [n, D]: down_e(swiglu(gate_up_e x)) for each of its experts e.

    experts int [n, K], weights [n, K] in `wide`; matrices: gate_up [E, 2 F, D], down [E, D, F]. copies: how many of `experts`
    are below E, the others are dropped; None: all. add: takes weight gradients (`defer_wgrad`).
    """
    if kernels.mixture is not None:
        fused = kernels.mixture(x, experts, weights, matrices, copies, add)
        if fused is not None:
            return fused
    gate_up, down = matrices
    permuted, rows, ends = kernels.permute(x, experts, len(gate_up), copies)
    hidden = kernels.swiglu(kernels.grouped_mm(permuted, gate_up.transpose(1, 2), ends))
    return kernels.unpermute(kernels.grouped_mm(hidden, down.transpose(1, 2), ends), rows, weights)


# The ops of each triton module.
TRITON: Mapping[str, tuple[str, ...]] = {
    "logprob_triton": ("vocab_stats", "vocab_grad_"),
    "norm_triton": ("rms_norm", "add_norm", "swiglu", "sum_deterministic"),
    "rope_triton": ("heads", "rope"),
    "moe_triton": ("top_k", "permute", "permute_tokens", "unpermute"),
    "paged_attention_triton": ("decode_attention", "write_entries"),
    "sampling_triton": ("draw",),
}


def kernels_for(device: torch.device, attention: AttentionName = "auto") -> KernelSet:
    """The fastest installed kernels of a device. attention: of a CUDA device."""
    if device.type == "cuda":
        return KernelSet(
            attention=_attention(device, attention),
            grouped_mm=cuda.grouped_mm,
            router_logits=cuda.router_logits,
            logits=cuda.logits,
            add_weight_grad_=cuda.add_weight_grad_,
            head_chunk=8192,
            **triton_kernels(),
            **(_quack_kernels(device) if quack.usable(device) else {}),
        )
    if device.type == "npu":
        return npu_kernels(importlib.import_module("torch_npu"), device)
    return KernelSet()


def _attention(device: torch.device, name: AttentionName) -> Callable[..., Tensor]:
    if name in ("auto", "fa4") and fa4.usable(device):
        return fa4.attention
    if name == "fa4":
        raise ConfigError(
            "attention=fa4 needs flash-attn-4 and a Hopper or Blackwell GPU: pip install 'dovetail[fa4]', or choose auto"
        )
    if name == "torch" or (name == "auto" and torch.cuda.get_device_capability(device)[0] < cudnn.ARCHITECTURE):
        return cuda.attention
    return cudnn.attention


def head_products() -> HeadProducts:
    """Those of `quack_head`, which needs triton."""
    head = importlib.import_module("dovetail.kernels.quack_head")
    return HeadProducts(quack.takes, head.logit_stats, head.logit_grads_)


def _quack_kernels(device: torch.device) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        return {"gated": GatedProducts()}
    mixture = importlib.import_module("dovetail.kernels.quack_moe").mixture
    hopper = torch.cuda.get_device_capability(device)[0] == cuda.HOPPER
    head = head_products() if hopper and cuda.package_usable(quack.EPILOGUE, "quack-kernels", device) else None
    return {"gated": GatedProducts(), "mixture": mixture, "head": head}


def triton_kernels() -> dict[str, Any]:
    """Op -> its triton kernel; empty where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return {}
    modules = {name: importlib.import_module(f"dovetail.kernels.{name}") for name in TRITON}
    return {op: getattr(modules[name], op) for name, ops in TRITON.items() for op in ops}


def npu_kernels(torch_npu: Any, device: torch.device) -> KernelSet:
    """The kernels of an Ascend NPU, from the module torch_npu."""
    npu = NpuKernels(torch_npu, device)
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
