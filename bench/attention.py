"""Speed of packed causal attention on a GPU, forward + backward: python -m bench.attention [--heads 28 4 128]

What the engine runs against FlashAttention-4 where flash_attn is installed, pairs interleaved in one process. Operations
are those of the causal half, the backward counted as 2.5 forwards.
"""

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from bench.harness import RESULTS, Case, compare, surroundings
from dovetail.batch import cumulative
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import kernels_for

PACKS = ((8192,), (32768,), (2048,) * 16, (512,) * 64)


@dataclass(frozen=True)
class Row:
    """One pack of sequences. TFLOP/s are medians of runs that alternate with the peer's."""

    sequences: int
    length: int
    heads: tuple[int, ...]
    ours_tflops: float
    peer: str | None
    peer_tflops: float | None


def row(lengths: tuple[int, ...], heads: tuple[int, ...], rounds: int) -> Row:
    """Forward and backward of one pack, `heads` being query heads, KV heads and their dim."""
    queries, groups, dim = heads
    tokens, device = sum(lengths), torch.device("cuda")
    spans = Spans(cumulative(lengths).to(device), lengths)
    q, k, v = (
        torch.randn(tokens, h, dim, device=device, dtype=torch.bfloat16).requires_grad_()
        for h in (queries, groups, groups)
    )
    up = torch.randn_like(q)
    attention = kernels_for(device).attention

    def timed(run: Callable[[], Tensor]) -> Callable[[], object]:
        def both() -> None:
            torch.autograd.grad(run(), (q, k, v), up)
            torch.cuda.synchronize()

        return both

    ours = timed(lambda: attention(q, k, v, spans, spans))
    peer = None
    if importlib.util.find_spec("flash_attn") is not None:
        flash = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        where = {f"cu_seqlens_{x}": spans.cu_seqlens for x in "qk"} | {f"max_seqlen_{x}": spans.longest for x in "qk"}
        with torch.no_grad():
            found = _only(flash(q, k, v, **where, causal=True))
            apart = float((found - attention(q, k, v, spans, spans)).abs().max())
        assert apart < 0.05, f"ours and the peer's differ by {apart}; the comparison would mean nothing"
        peer = timed(lambda: _only(flash(q, k, v, **where, causal=True)))
    one = compare(Case("attention", tokens, ours, peer or ours), rounds)
    flops = 3.5 * sum(4 * queries * dim * n * n / 2 for n in lengths) / 1e12
    return Row(
        sequences=len(lengths),
        length=lengths[0],
        heads=heads,
        ours_tflops=round(flops / one.ours_seconds, 1),
        peer="FlashAttention-4" if peer else None,
        peer_tflops=round(flops / one.peer_seconds, 1) if peer else None,
    )


def _only(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def main() -> None:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    parser.add_argument("--heads", type=int, nargs=3, default=[28, 4, 128], help="query heads, KV heads, head dim")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "attention_h200.json")
    given = parser.parse_args()
    found = [row(lengths, tuple(given.heads), given.rounds) for lengths in PACKS]
    for one in found:
        print(one)
    peers = {name: metadata.version(name) for name in ("flash-attn-4",) if importlib.util.find_spec("flash_attn")}
    result = {"bench": "attention", **surroundings(), "peers": peers, "results": [asdict(one) for one in found]}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
