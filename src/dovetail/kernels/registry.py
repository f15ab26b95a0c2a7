"""Which implementation computes each op: chosen once from the device, then passed down as a value."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dovetail.kernels import cuda, reference


@dataclass(frozen=True)
class KernelSet:
    """One implementation of every op of `reference`, and how many tokens the head computes at a time."""

    attention: Callable[..., Tensor] = reference.attention
    decode_attention: Callable[..., Tensor] = reference.decode_attention
    rms_norm: Callable[..., Tensor] = reference.rms_norm
    swiglu: Callable[..., Tensor] = reference.swiglu
    logits: Callable[..., Tensor] = reference.logits
    vocab_stats: Callable[..., Tensor] = reference.vocab_stats
    vocab_grad_: Callable[..., Tensor] = reference.vocab_grad_
    add_weight_grad_: Callable[..., None] = reference.add_weight_grad_
    head_chunk: int = 1024

    def describe(self) -> dict[str, str]:
        """Op -> the module that computes it."""
        ops = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: op.__module__.rpartition(".")[2] for name, op in ops.items() if callable(op)}


def kernels_for(device: torch.device) -> KernelSet:
    """The kernels of a device: the reference, with what the device does better put in its place."""
    if device.type == "cuda":
        return KernelSet(
            attention=cuda.attention, logits=cuda.logits, add_weight_grad_=cuda.add_weight_grad_, head_chunk=4096
        )
    return KernelSet()
