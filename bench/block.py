"""Bandwidth of what a block does beside its products and attention: python -m bench.block [--tokens 32768] [--device cuda]

Every kernel, forward and backward, against a copy in the same run (the ceiling) and against the reference's torch
operations. Bytes are those that have to be moved at least once: each argument read, each result written.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.given import device as device_here, positive, run_main
from bench.harness import RESULTS, surroundings
from bench.timing import milliseconds
from dovetail.kernels.registry import KernelSet, kernels_for

Op = Callable[[KernelSet], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Work:
    """One operation: what it computes, what it is differentiated by, and how many numbers each direction moves."""

    name: str
    op: Op
    inputs: tuple[Tensor, ...]
    forward: int
    backward: int


@dataclass(frozen=True)
class Row:
    """Medians of runs that alternate. share: of what a copy moves in the same time."""

    name: str
    direction: str
    ours_ms: float
    reference_ms: float
    ours_gb_per_s: float
    share: float


@dataclass(frozen=True)
class Sizes:
    """Of a model: those of Qwen2.5-7B; the heads with norms are Qwen3-4B's."""

    tokens: int
    width: int = 3584
    ffn: int = 18944
    heads: tuple[int, int] = (28, 4)
    normed_heads: tuple[int, int] = (32, 8)
    channels: int = 128


def works(s: Sizes, device: torch.device) -> Iterator[Work]:
    """All of them, in bfloat16."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    t, d = s.tokens, s.width
    x, y, w = drawn(t, d), drawn(t, d), drawn(d)
    yield Work("rms_norm", lambda k: (k.rms_norm(x, w, 1e-6),), (x, w), 2 * t * d, 3 * t * d)
    yield Work("add_norm", lambda k: k.add_norm(x, y, w, 1e-6), (x, y, w), 4 * t * d, 4 * t * d)
    angles = torch.rand(t, s.channels // 2, device=device) * 6
    tables = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    for name, counts, normed in (
        ("heads", s.heads, False),
        ("heads, normed", s.normed_heads, True),
    ):
        turned, every = (t * s.channels * (counts[0] + n * counts[1]) for n in (1, 2))
        qkv, gains = (
            drawn(t, every // t),
            (drawn(s.channels), drawn(s.channels)) if normed else None,
        )
        yield Work(
            name,
            lambda k, qkv=qkv, counts=counts, gains=gains: k.heads(
                qkv, counts, *tables, gains, 1e-6
            ),
            (qkv, *(gains or ())),
            2 * turned,
            2 * every + (turned if normed else 0),
        )
    gate_up = drawn(t, 2 * s.ffn)
    yield Work("swiglu", lambda k: (k.swiglu(gate_up),), (gate_up,), 3 * t * s.ffn, 5 * t * s.ffn)


def rows(work: Work, device: torch.device, rounds: int) -> Iterator[Row]:
    """Forward and backward of one operation."""
    sets = {"ours": kernels_for(device), "reference": KernelSet()}
    copied = torch.empty(max(work.forward, work.backward) // 2, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(copied)

    def forward(kernels: KernelSet) -> Callable[[], object]:
        def quiet() -> object:
            with torch.no_grad():
                return work.op(kernels)

        return quiet

    def backward(kernels: KernelSet) -> Callable[[], object]:
        outputs = work.op(kernels)
        up = [torch.randn_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, work.inputs, up, retain_graph=True)

    for direction, make, numbers in (
        ("forward", forward, work.forward),
        ("backward", backward, work.backward),
    ):
        half = slice(0, numbers // 2)
        runs = {name: make(kernels) for name, kernels in sets.items()}
        runs["copy"] = lambda half=half: other[half].copy_(copied[half])
        found = milliseconds(runs, device, rounds)
        yield Row(
            name=work.name,
            direction=direction,
            ours_ms=round(found["ours"], 4),
            reference_ms=round(found["reference"], 4),
            ours_gb_per_s=round(2e-6 * numbers / found["ours"], 1),
            share=round(found["copy"] / found["ours"], 3),
        )


def main() -> None:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.block", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=32768)
    parser.add_argument("--device", type=device_here, default="cuda")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "block_h200.json")
    given = parser.parse_args()
    device, sizes = torch.device(given.device), Sizes(given.tokens)
    if given.tiny:
        sizes = replace(sizes, width=64, ffn=96, heads=(4, 2), normed_heads=(4, 2), channels=16)
    torch.manual_seed(0)
    found = []
    for work in works(sizes, device):
        for row in rows(work, device, given.rounds):
            found.append(row)
            print(line(row), flush=True)
    result = {
        "bench": "block",
        **surroundings(),
        "sizes": asdict(sizes),
        "results": [asdict(row) for row in found],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(given.out)


def line(row: Row) -> str:
    """What a person reads."""
    return (
        f"{row.name:14} {row.direction:9} ours {row.ours_ms:8.4f} ms {row.ours_gb_per_s:8.1f} GB/s, "
        f"{row.share:5.2f} of a copy   torch {row.reference_ms:8.4f} ms  x{row.reference_ms / row.ours_ms:.2f}"
    )


if __name__ == "__main__":
    run_main(main)
