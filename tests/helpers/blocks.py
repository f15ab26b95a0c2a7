"""A few blocks of a tiny model with random weights, what their passes run, and the gradients that these give."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.batch.packed import cumulative
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import PRODUCTS, PinnedPool, Recompute, is_attention
from dovetail.nn.attention import BatchContext, PackedAttention, rope_tables
from dovetail.nn.decoder import Trunk
from dovetail.nn.model import StageRange
from dovetail.parallel.mesh import Mesh
from tests.helpers.parity_configs import tiny_configs


class Runs(TorchDispatchMode):
    """Counts attention kernels, by direction and by name, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if is_attention(name):
            self.seen["backward" if "backward" in name else "forward"] += 1
            self.seen[name] += 1
        elif name in PRODUCTS:
            self.seen["product"] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Blocks:
    """Blocks of heads of 64, with an embedding before and a norm behind them."""

    kernels: KernelSet = field(default_factory=KernelSet)
    dtype: torch.dtype = torch.float64
    lengths: tuple[int, ...] = (9, 3, 5)
    depth: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def spec(self) -> ArchSpec:
        config = tiny_configs()["llama_head_dim"].to_dict()
        return spec_from_config({**config, "head_dim": 64, "num_hidden_layers": self.depth})

    @cached_property
    def context(self) -> BatchContext:
        positions = torch.cat([torch.arange(n) for n in self.lengths])
        cos, sin = (
            table.to(self.device)
            for table in rope_tables(self.spec.rope, positions, self.lengths, self.dtype)
        )
        spans = Spans(cumulative(self.lengths).to(self.device), self.lengths)
        return BatchContext(cos, sin, PackedAttention(spans, self.kernels), Routes())

    def trunk(self, recompute: Recompute, *, offload: bool = False) -> Trunk:
        made = Trunk(
            self.spec, Mesh.solo(), self.kernels, recompute, StageRange.whole(self.spec), tied=False
        )
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 8
                )
        made.host = PinnedPool(self.device) if offload else None
        return made.to(self.device, self.dtype)

    def tokens(self, micros: int) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        return torch.randint(self.spec.vocab_size, (micros, sum(self.lengths)), generator=draw).to(
            self.device
        )

    def gradients(
        self, model: Trunk, micros: int = 1, repeats: int = 1
    ) -> tuple[dict[str, Tensor], Counter[str]]:
        """Of some micro-batches, all alive at once, whose backward passes come in the order of their forward ones; and what
        one micro-batch ran."""
        with Runs() as runs:
            for _ in range(repeats):
                model.zero_grad()
                outs = [model(row, self.context) for row in self.tokens(micros)]
                for out in outs:
                    out.backward(out.detach())
                del outs, out
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return grads, Counter({key: n // (repeats * micros) for key, n in runs.seen.items()})
