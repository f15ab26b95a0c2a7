"""What a block's backward pass computes again: attention never, unless asked; and where waits what it keeps instead."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.arch.registry import spec_from_config
from dovetail.batch import cumulative
from dovetail.kernels import fa4
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Mesh
from dovetail.nn.context import BatchContext, PackedAttention
from dovetail.nn.decoder import Trunk
from dovetail.nn.model import Cut
from dovetail.nn.recompute import PRODUCTS, HostMemory, Recompute, is_attention
from dovetail.nn.rope import rope_tables
from dovetail.routing import Routes
from tests.parity.configs import tiny_configs
from tests.tolerances import EXACT, worst_error
from tests.unit.fa4_stand_in import installed

LENGTHS = (9, 3, 5)
DEPTH = 3


@dataclass
class Made:
    """What some forward and backward passes gave."""

    grads: dict[str, Tensor]
    runs: Counter[str]
    host: HostMemory | None


class Runs(TorchDispatchMode):
    """Counts attention kernels and products by direction."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if is_attention(name):
            self.seen["backward" if "backward" in name else "forward"] += 1
        elif name in PRODUCTS:
            self.seen["product"] += 1
        return func(*args, **(kwargs or {}))


def trunk(recompute: Recompute, kernels: KernelSet, dtype: torch.dtype, family: str = "llama") -> Trunk:
    config = tiny_configs()[family]
    if dtype == torch.bfloat16:
        config.head_dim = 64
    config.num_hidden_layers = DEPTH
    spec = spec_from_config(config.to_dict())
    made = Trunk(spec, Mesh.solo(), kernels, recompute, Cut.whole(spec), tied=False).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 8)
    return made


def context(kernels: KernelSet, dtype: torch.dtype) -> BatchContext:
    spec = spec_from_config(
        {**tiny_configs()["llama"].to_dict(), **({"head_dim": 64} if dtype == torch.bfloat16 else {})}
    )
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cos, sin = rope_tables(spec.rope, positions, LENGTHS, dtype)
    return BatchContext(cos, sin, PackedAttention(Spans(cumulative(LENGTHS), LENGTHS), kernels), Routes())


def made(
    recompute: Recompute,
    *,
    offload: bool = False,
    micros: int = 1,
    kernels: KernelSet | None = None,
    dtype: torch.dtype = torch.float64,
) -> Made:
    """Gradients of some micro-batches, all alive at once, their backward passes in the order of their forward ones."""
    kernels = kernels or KernelSet()
    model = trunk(recompute, kernels, dtype)
    model.host = HostMemory(torch.device("cpu")) if offload else None
    seen, draw = context(kernels, dtype), torch.Generator().manual_seed(1)
    tokens = torch.randint(model.embed_tokens.weight.shape[0], (micros, sum(LENGTHS)), generator=draw)
    with Runs() as runs:
        for _ in range(2):  # so that arenas are used again
            model.zero_grad()
            outs = [model(row, seen) for row in tokens]
            for out in outs:
                out.backward(out.detach())
            del outs, out
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Made(grads, Counter({key: n // (2 * micros) for key, n in runs.seen.items()}), model.host)


def same(found: Made, expected: Made) -> bool:
    return worst_error(found.grads, expected.grads)[0] == EXACT


RECOMPUTES: tuple[Recompute, ...] = ("light", "selective", "full")


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_what_runs_again(recompute: Recompute) -> None:
    """Attention once a layer and span of equal lengths, unless everything is computed again. The light level repeats no
    product; the last one of a block is never repeated, since nothing of the block needs it."""
    expected, found = made("none"), made(recompute)
    assert same(found, expected)
    once = expected.runs
    assert once["forward"] == once["backward"] == DEPTH * len(LENGTHS)
    assert found.runs["forward"] == (2 if recompute == "full" else 1) * once["forward"]
    again = {"light": 0, "selective": 3 * DEPTH, "full": 3 * DEPTH}[recompute]  # qkv, o and gate_up
    assert found.runs["product"] == once["product"] + again


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("micros", [1, 3])
def test_offload_changes_no_gradient(recompute: Recompute, micros: int) -> None:
    expected, found = made("none", micros=micros), made(recompute, offload=True, micros=micros)
    assert same(found, expected)
    assert found.runs == made(recompute, micros=micros).runs
    assert found.host is not None and len(found.host.free) == micros, "an arena for each live micro-batch, used again"


def test_the_operation_of_fa4_is_kept() -> None:
    kernels = KernelSet(attention=fa4.attention)
    with installed() as package:
        expected = made("none", kernels=kernels, dtype=torch.bfloat16)
        assert package.calls == {"forward": 2 * DEPTH, "backward": 2 * DEPTH}
        for recompute in RECOMPUTES:
            for offload in (False, True):
                package.calls.clear()
                assert same(made(recompute, offload=offload, kernels=kernels, dtype=torch.bfloat16), expected)
                runs = 2 if recompute == "full" else 1
                assert package.calls == {"forward": 2 * DEPTH * runs, "backward": 2 * DEPTH}
