"""One mixture of experts of Qwen3-30B-A3B's shape on one GPU: forward, forward and backward, and what each part takes.

    python -m bench.moe_layer [--tokens 32768] [--out FILE.json]

Routing is natural: random hidden states and a random router in bfloat16.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import kernels_for
from dovetail.mesh import Mesh
from dovetail.nn.moe import MoE
from dovetail.routing import Routes, count_rows

SHAPE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
REPEATS = 20


def main() -> None:
    """Measure and write one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda")
    spec = spec_from_config({"model_type": "qwen3_moe", "norm_topk_prob": True, **SHAPE})
    rows = {name: milliseconds(run) for name, run in parts(spec, given.tokens, device).items()}
    for name, time in rows.items():
        print(f"{name:<28} {time:8.3f} ms")  # a command's own output
    if given.out:
        found: dict[str, Any] = {
            "environment": environment(),
            "shape": SHAPE,
            "tokens": given.tokens,
            "milliseconds": rows,
        }
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def parts(spec: ArchSpec, tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    torch.manual_seed(0)
    kernels = kernels_for(device)
    moe = MoE(spec, 0, Mesh.solo(device), kernels).to(device, torch.bfloat16)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, spec.width, device=device, dtype=torch.bfloat16)
    assert spec.moe is not None
    with torch.no_grad():
        indices, weights = moe.gate(x, Routes())
    moved, places = kernels.permute(x, indices)
    counts = count_rows(indices.flatten(), spec.moe.num_experts)
    ends = counts.cumsum(0)
    gate_up, down = moe.experts.gate_up_proj.transpose(1, 2), moe.experts.down_proj.transpose(1, 2)
    wide = kernels.grouped_mm(moved, gate_up, ends).detach()
    half = kernels.swiglu(*wide.chunk(2, dim=-1)).detach()
    back = kernels.grouped_mm(half, down, ends).detach()

    def forward() -> Tensor:
        with torch.no_grad():
            return moe(x, Routes())

    def both() -> None:
        leaf = x.detach().requires_grad_()
        moe(leaf, Routes()).sum().backward()

    def grouped() -> object:
        with torch.no_grad():
            return kernels.grouped_mm(moved, gate_up, ends), kernels.grouped_mm(half, down, ends)

    def routed() -> object:
        with torch.no_grad():
            return moe.gate(x, Routes())

    return {
        "forward": forward,
        "forward and backward": both,
        "router": routed,
        "rows to experts": lambda: kernels.permute(x, indices),
        "grouped products": grouped,
        "swiglu": lambda: kernels.swiglu(*wide.chunk(2, dim=-1)),
        "rows back, weighted": lambda: kernels.unpermute(back, places, weights),
    }


def milliseconds(run: Callable[[], object]) -> float:
    """The median of some runs on an idle device."""
    for _ in range(5):
        run()
    found = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return median(found)


if __name__ == "__main__":
    main()
