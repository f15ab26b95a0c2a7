"""Which implementation computes each op, by device."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import cuda, cudnn, divergence, fa4, quack, reference, reference_experts
from dovetail.kernels.npu import NpuKernels

TRITON: Mapping[str, tuple[str, ...]] = {
    "logprob_triton": ("vocab_stats", "vocab_grad_"),
    "norm_triton": ("rms_norm", "add_norm", "swiglu", "sum_deterministic"),
    "rope_triton": ("heads", "rope"),
    "moe_triton": ("top_k", "permute", "permute_tokens", "unpermute"),
    "paged_attention_triton": ("decode_attention", "write_entries"),
    "sampling_triton": ("draw",),
    "divergence_triton": ("divergence_sums", "divergence_grad_"),
}
NPU = (
    "attention",
    "rms_norm",
    "add_norm",
    "heads",
    "rope",
    "swiglu",
    "grouped_mm",
    "permute",
    "unpermute",
)


@dataclass(frozen=True)
class KernelSet:
    """Every op of `reference`, and fused ones where a device has them; mixture returns None for unsupported inputs."""

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
    grouped_mm: Callable[..., Tensor] = reference_experts.grouped_mm
    top_k: Callable[..., Tensor] = reference_experts.top_k
    router_logits: Callable[..., Tensor] = reference_experts.router_logits
    permute: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference_experts.permute
    permute_tokens: Callable[..., Tensor] = reference_experts.permute_tokens
    unpermute: Callable[..., Tensor] = reference_experts.unpermute
    logits: Callable[..., Tensor] = reference.logits
    vocab_stats: Callable[..., Tensor] = reference.vocab_stats
    vocab_grad_: Callable[..., Tensor] = reference.vocab_grad_
    add_weight_grad_: Callable[..., None] = reference.add_weight_grad_
    divergence_sums: Callable[..., Tensor] = divergence.divergence_sums
    divergence_grad_: Callable[..., Tensor] = divergence.divergence_grad_
    head_chunk: int = 1024  # tokens
    mixture: Callable[..., Tensor | None] | None = None
    gated: ModuleType | None = None
    head: ModuleType | None = None
    draw: Callable[..., Tensor] | None = None

    def describe(self) -> dict[str, str]:
        ops = {f.name: getattr(self, f.name) for f in fields(self)}
        ops |= {
            "gated": self.gated and self.gated.gated,
            "head": self.head and self.head.logit_stats,
        }
        return {name: op.__module__.rpartition(".")[2] for name, op in ops.items() if callable(op)}


def kernels_for(device: torch.device) -> KernelSet:
    if device.type == "cuda":
        return KernelSet(
            attention=_attention(device),
            grouped_mm=cuda.grouped_mm,
            router_logits=cuda.router_logits,
            logits=cuda.logits,
            add_weight_grad_=cuda.add_weight_grad_,
            head_chunk=8192,
            **triton_kernels(),
            **(_quack_kernels(device) if cuda.package_usable(quack.INTERFACE, device) else {}),
        )
    if device.type == "npu":
        return npu_kernels(importlib.import_module("torch_npu"), device)
    return KernelSet()


def _attention(device: torch.device) -> Callable[..., Tensor]:
    if cuda.package_usable(fa4.INTERFACE, device):
        return fa4.attention
    old = torch.cuda.get_device_capability(device)[0] < cudnn.ARCHITECTURE
    return cuda.attention if old else cudnn.attention


def _quack_kernels(device: torch.device) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        return {"gated": quack}
    hopper = torch.cuda.get_device_capability(device)[0] == cuda.HOPPER
    head = hopper and cuda.package_usable(quack.EPILOGUE, device)
    return {
        "gated": quack,
        "mixture": importlib.import_module("dovetail.kernels.quack_moe").mixture,
        "head": importlib.import_module("dovetail.kernels.quack_head") if head else None,
    }


def triton_kernels() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        return {}
    modules = {name: importlib.import_module(f"dovetail.kernels.{name}") for name in TRITON}
    return {op: getattr(modules[name], op) for name, ops in TRITON.items() for op in ops}


def npu_kernels(torch_npu: Any, device: torch.device) -> KernelSet:
    npu = NpuKernels(torch_npu, device)
    return KernelSet(**{op: getattr(npu, op) for op in NPU}, head_chunk=4096)
