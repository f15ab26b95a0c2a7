"""Speed of packed causal attention, of every kernel that the engine may choose: python -m bench.attention

Forward alone, and forward + backward. All kernels of a case run in turns in one process, timed by the device's clock (`timing`);
figures are medians, and TFLOP/s are operations of the causal half, the backward counted as 2.5 forwards. The ceiling is a large
product of the same run.
`--device cpu --shrink 64` tries it out.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.given import device as device_here, positive, run_main
from bench.harness import RESULTS, surroundings
from bench.timing import milliseconds
from dovetail.batch.packed import cumulative
from dovetail.kernels import cuda, cudnn, fa4
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import kernels_for
from dovetail.nn.activation_checkpoint import is_attention

WIDE = (28, 4, 128, 128)  # heads of queries, of keys; channels of keys, of values
NARROW, LATENT = (14, 2, 64, 64), (16, 16, 192, 128)
MIXED = (2048,) * 16
RAGGED = (
    7919,
    3001,
    211,
    5003,
    90,
    12007,
    1500,
    2000,
    1037,
)  # as in RL: 32768 tokens, a quarter of the longest on average
CASES = (
    (WIDE, (8192,)),
    (WIDE, (32768,)),
    (WIDE, (131072,)),
    (WIDE, MIXED),
    (WIDE, (512,) * 64),
    (WIDE, RAGGED),
    (NARROW, (8192,)),
    (NARROW, (32768,)),
    (NARROW, MIXED),
    (LATENT, (8192,)),
    (LATENT, MIXED),
)
REPEATED = ((WIDE, (8192,)), (WIDE, MIXED))  # measured once more with deterministic algorithms
LONG = 1 << 16  # tokens of a sequence from which one run at a time is measured, and fewer of them


@dataclass(frozen=True)
class Row:
    """One kernel on one pack of sequences."""

    heads: tuple[int, ...]
    pack: str
    kernel: str
    deterministic: bool
    forward_tflops: float
    both_tflops: float
    rounds: int


class Seen(TorchDispatchMode):
    """Which attention kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if is_attention(str(func)):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows(
    heads: tuple[int, ...],
    lengths: tuple[int, ...],
    device: torch.device,
    rounds: int,
    *,
    again: bool,
) -> list[Row]:
    """Every kernel on one pack. again: with deterministic algorithms."""
    queries, groups, dim, dim_v = heads
    spans = Spans(cumulative(lengths).to(device), lengths)
    tokens, dtype = sum(lengths), torch.bfloat16
    q = torch.randn(tokens, queries, dim, device=device, dtype=dtype).requires_grad_()
    k = torch.randn(tokens, groups, dim, device=device, dtype=dtype).requires_grad_()
    v = torch.randn(tokens, groups, dim_v, device=device, dtype=dtype).requires_grad_()
    up = torch.randn(tokens, queries, dim_v, device=device, dtype=dtype)
    timed: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name, attention in known(device).items():
        with Seen() as seen, deterministic(again):
            found = attention(q, k, v, spans, spans)
        if name in ("cudnn", "fa4") and not any(name in op for op in seen.names):
            continue  # it hands this pack on

        def forward(attention: Callable[..., Tensor] = attention) -> object:
            with torch.no_grad():
                return attention(q, k, v, spans, spans)

        def both(attention: Callable[..., Tensor] = attention) -> object:
            return torch.autograd.grad(attention(q, k, v, spans, spans), (q, k, v), up)

        first = next(iter(timed.values()), None)
        if first is not None:
            apart = float((found - first[0]()).abs().max())  # type: ignore[operator]
            assert apart < 0.05, (
                f"{name} is {apart} from the others; a comparison would mean nothing"
            )
        timed[name] = forward, both
    long = max(lengths) >= LONG
    rounds, each = (max(1, rounds // 3), 1) if long else (rounds, 5)
    runs = {f"{name} {i}": run for name, pair in timed.items() for i, run in enumerate(pair)}
    with deterministic(again):
        ms = milliseconds(runs, device, rounds, each)
    work = 4 * queries * (dim + dim_v) / 2 * sum(n * n / 2 for n in lengths) / 1e9
    pack = (
        f"{len(lengths)} x {lengths[0]}"
        if len(set(lengths)) == 1
        else f"{len(lengths)} ragged, {tokens}"
    )
    return [
        Row(
            heads,
            pack,
            name,
            again,
            round(work / ms[f"{name} 0"], 1),
            round(3.5 * work / ms[f"{name} 1"], 1),
            rounds,
        )
        for name in timed
    ]


def known(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """The kernels that may be asked for on this device, by name."""
    if device.type == "cpu":
        return {"reference": kernels_for(device).attention}
    found = {"torch": cuda.attention, "cudnn": cudnn.attention}
    return found | ({"fa4": fa4.attention} if cuda.package_usable(fa4.INTERFACE, device) else {})


def ceiling(device: torch.device, size: int) -> float:
    """TFLOP/s of a square product."""
    x, y = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / milliseconds({"product": lambda: x @ y}, device, 15)["product"] / 1e9


def plan_seconds(device: torch.device, name: str) -> float:
    """What the first pass over a new shape takes beyond the second: planning, or compiling, or nothing."""
    attention, n = known(device)[name], 5120
    spans = Spans(cumulative((n,)).to(device), (n,))
    q, k, v = (
        torch.randn(n, h, 128, device=device, dtype=torch.bfloat16).requires_grad_()
        for h in (28, 4, 4)
    )
    first, second = (
        clock(lambda: attention(q, k, v, spans, spans).sum().backward()) for _ in range(2)
    )
    return first - second


def clock(run: Callable[[], object]) -> float:
    """Seconds by the host's clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    parser.add_argument("--device", type=device_here, default="cuda")
    parser.add_argument("--shrink", type=positive, default=1, help="divide all lengths")
    parser.add_argument("--rounds", type=positive, default=9, help="of a case; the median counts")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention_h200.json")
    given = parser.parse_args()
    device = torch.device(given.device)
    if "fa4" not in known(device):
        print("flash-attn-4 is not installed, or not for this device: no rows of it")
    limit = ceiling(device, 8192 // given.shrink)
    print(f"a product of {8192 // given.shrink}^3 runs at {limit:.1f} TFLOP/s")
    print(
        f"{'heads':>20} {'pack':>18} {'kernel':>10} {'forward':>8} {'both':>8} {'of product':>10}"
    )
    found = []
    for again, cases in ((False, CASES), (True, REPEATED)):
        for heads, lengths in cases:
            short = tuple(max(1, n // given.shrink) for n in lengths)
            for row in rows(heads, short, device, given.rounds, again=again):
                found.append(row)
                shape, name = "/".join(map(str, heads)), row.kernel + "*" * again
                share = row.both_tflops / limit
                print(
                    f"{shape:>20} {row.pack:>18} {name:>10} {row.forward_tflops:8} {row.both_tflops:8} {share:10.2f}",
                    flush=True,
                )
    print("* deterministic")
    plans: dict[str, float] = {}
    if device.type == "cuda":
        plans = {name: round(plan_seconds(device, name), 4) for name in known(device)}  # type: ignore[arg-type]
        print(f"seconds that a new shape takes at first: {plans}")
    versions = {
        d.name: d.version
        for d in metadata.distributions()
        if d.name in ("flash-attn-4", "nvidia-cutlass-dsl")
    }
    result = {
        "bench": "attention",
        **surroundings(),
        "kernels": versions,
        "product_tflops": round(limit, 1),
        "plan_seconds": plans,
        "results": [asdict(row) for row in found],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
