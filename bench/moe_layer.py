"""One mixture of experts of Qwen3-30B-A3B's shape on one GPU: the layer, its parts, and its products laid out in other ways.

    python -m bench.moe_layer [--tokens 32768] [--device cuda]

Routing is natural: random hidden states and a random router in bfloat16. Each part stands beside the reference's torch
operations and beside what a copy of the same bytes takes, or, for products, one dense product of as many operations.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.given import device as device_here, positive, run_main
from bench.harness import RESULTS, surroundings
from bench.timing import Run, milliseconds
from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.batch.routing import Routes
from dovetail.kernels import reference
from dovetail.kernels.registry import KernelSet, kernels_for
from dovetail.nn.moe import MoE
from dovetail.parallel.mesh import Mesh

SHAPE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
TINY = {"hidden_size": 128, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Layer:
    """A layer, its tokens, and what it computes of them on the way."""

    moe: MoE
    x: Tensor
    kernels: KernelSet
    scores: Tensor
    indices: Tensor
    weights: Tensor
    moved: Tensor
    rows: Tensor
    ends: Tensor
    gate_up: Tensor
    half: Tensor
    back: Tensor

    @classmethod
    @torch.no_grad()
    def random(cls, spec: ArchSpec, tokens: int, device: torch.device) -> "Layer":
        torch.manual_seed(0)
        kernels = kernels_for(device)
        moe = MoE(spec, 0, Mesh.solo(device), kernels).to(device, torch.bfloat16)
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(tokens, spec.width, device=device, dtype=torch.bfloat16)
        scores = kernels.router_logits(x, moe.gate.weight).softmax(-1)
        indices, weights = moe.gate(x, Routes())
        moved, rows, ends = kernels.permute(x, indices, moe.moe.num_experts)
        first, second = (
            w.transpose(1, 2) for w in (moe.experts.gate_up_proj, moe.experts.down_proj)
        )
        gate_up = kernels.grouped_mm(moved, first, ends)
        half = kernels.swiglu(gate_up)
        back = kernels.grouped_mm(half, second, ends)
        return cls(
            moe, x, kernels, scores, indices, weights, moved, rows, ends, gate_up, half, back
        )

    def forward(self) -> Tensor:
        with torch.no_grad():
            y: Tensor = self.moe(self.x, Routes())
        return y

    def both(self) -> None:
        leaf = self.x.detach().requires_grad_()
        y = self.moe(leaf, Routes())
        torch.autograd.grad(y, (leaf, *self.moe.parameters()), self.x)


def parts(a: Layer) -> dict[str, tuple[Run, Run, int]]:
    """Name -> ours, the reference's, and the numbers of two bytes that are moved at least once."""
    k, r, moe = a.kernels, reference, a.moe
    count, top = moe.moe.num_experts, moe.moe.top_k
    (t, d), copies, f = a.x.shape, a.rows.numel(), a.half.shape[1]
    gate = moe.gate.weight.detach()
    return {
        "router, product": (
            lambda: k.router_logits(a.x, gate),
            lambda: r.router_logits(a.x, gate),
            t * (d + 2 * count),
        ),
        "router, choice": (
            lambda: k.top_k(a.scores, top),
            lambda: r.top_k(a.scores, top),
            t * (2 * count + 4 * top),
        ),
        "router, all of it": (
            lambda: moe.gate(a.x, Routes()),
            lambda: moe.gate(a.x, Routes()),
            t * (d + 8 * count),
        ),
        "rows to experts": (
            lambda: k.permute(a.x, a.indices, count),
            lambda: r.permute(a.x, a.indices, count),
            (t + copies) * d,
        ),
        "swiglu": (lambda: k.swiglu(a.gate_up), lambda: r.swiglu(a.gate_up), 3 * copies * f),
        "rows back, weighted": (
            lambda: k.unpermute(a.back, a.rows, a.weights),
            lambda: r.unpermute(a.back, a.rows, a.weights),
            (t + copies) * d,
        ),
    }


def backwards(a: Layer) -> dict[str, tuple[Run, Run, int]]:
    """The same of the backward passes."""
    moe = a.moe
    count, (t, d), copies, f = moe.moe.num_experts, a.x.shape, a.rows.numel(), a.half.shape[1]

    def back(
        op: Callable[[KernelSet, Tensor, Tensor], Tensor], x: Tensor, other: Tensor
    ) -> tuple[Run, Run]:
        found: list[Run] = []
        for kernels in (a.kernels, KernelSet()):
            leaves = [x.detach().requires_grad_(), other.detach().requires_grad_()]
            y = op(kernels, *leaves)
            up = torch.randn_like(y)
            found.append(
                lambda y=y, up=up, of=leaves: torch.autograd.grad(
                    y, of, up, True, allow_unused=True
                )
            )
        return found[0], found[1]

    return {
        "router, product": (
            *back(lambda k, x, w: k.router_logits(x, w), a.x, moe.gate.weight),
            t * (2 * d + 2 * count),
        ),
        "rows to experts": (
            *back(lambda k, x, _: k.permute(x, a.indices, count)[0], a.x, a.x),
            (t + copies) * d,
        ),
        "swiglu": (*back(lambda k, x, _: k.swiglu(x), a.gate_up, a.x), 5 * copies * f),
        "rows back, weighted": (
            *back(lambda k, x, w: k.unpermute(x, a.rows, w), a.back, a.weights),
            (t + 2 * copies) * d,
        ),
    }


def products(a: Layer) -> dict[str, Run]:
    """The grouped products as they are and laid out otherwise, and one dense product of as many operations."""
    grouped, experts = a.kernels.grouped_mm, a.moe.experts
    found: dict[str, Run] = {}
    pairs = (
        ("gate and up", a.moved, experts.gate_up_proj.detach()),
        ("down", a.half, experts.down_proj.detach()),
    )
    even = torch.arange(1, len(a.ends) + 1, device=a.ends.device) * (len(a.moved) // len(a.ends))
    even[-1] = len(a.moved)
    narrow = a.ends.to(torch.int32)
    tiled = ((a.ends + 64) // 128 * 128).clamp(
        max=len(a.moved)
    )  # experts that end where tiles of a product do
    tiled[-1] = len(a.moved)
    for name, x, weight in pairs:
        turned, dense = weight.transpose(1, 2), weight[0].T
        upright, nothing, blank = turned.contiguous(), torch.zeros_like(x), torch.zeros_like(turned)
        found |= {
            f"{name}": lambda x=x, w=turned: grouped(x, w, a.ends),
            f"{name}, ends in int32": lambda x=x, w=turned: grouped(x, w, narrow),
            f"{name}, weights [E, K, N] in memory": lambda x=x, w=upright: grouped(x, w, a.ends),
            f"{name}, experts evenly loaded": lambda x=x, w=turned: grouped(x, w, even),
            f"{name}, experts end at whole tiles": lambda x=x, w=turned: grouped(x, w, tiled),
            f"{name}, of zeros": lambda x=nothing, w=blank: grouped(x, w, a.ends),
            f"{name}, one dense product": lambda x=x, w=dense: x @ w,
        }
    return found


def measured(a: Layer, device: torch.device, rounds: int) -> dict[str, dict[str, Any]]:
    """All tables."""
    whole = milliseconds({"forward": a.forward, "forward and backward": a.both}, device, rounds)
    flops = {
        name: 2 * a.moved.numel() * n
        for name, n in (("gate", a.gate_up.shape[1]), ("down", a.half.shape[1]))
    }
    each = {}
    with torch.no_grad():
        for name, time in milliseconds(products(a), device, rounds).items():
            each[name] = {"ms": round(time, 4), "tflops": round(flops[name[:4]] / time / 1e9, 1)}
    return {
        "layer": {name: round(time, 4) for name, time in whole.items()},
        "parts, forward": {name: _row(*part, device, rounds) for name, part in parts(a).items()},
        "parts, backward": {
            name: _row(*part, device, rounds) for name, part in backwards(a).items()
        },
        "products, forward": each,
    }


def _row(
    ours: Run, theirs: Run, numbers: int, device: torch.device, rounds: int
) -> dict[str, float]:
    copied = torch.empty(numbers // 2, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(copied)
    runs = {"ours": ours, "torch": theirs, "copy": lambda: other.copy_(copied)}
    return {
        f"{name}_ms": round(time, 4) for name, time in milliseconds(runs, device, rounds).items()
    }


def main() -> None:
    """Measure, print and write tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.moe_layer", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=32768)
    parser.add_argument("--device", type=device_here, default="cuda")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--tiny", action="store_true", help="a small layer, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "moe_layer_h200.json")
    given = parser.parse_args()
    device, shape = torch.device(given.device), TINY if given.tiny else SHAPE
    spec = spec_from_config({"model_type": "qwen3_moe", "norm_topk_prob": True, **shape})
    found = measured(Layer.random(spec, given.tokens, device), device, given.rounds)
    for title, table in found.items():
        print(title)
        for name, row in table.items():
            print(f"  {name:40} {row}")
    result = {
        "bench": "moe_layer",
        **surroundings(),
        "shape": shape,
        "tokens": given.tokens,
        **found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    run_main(main)
