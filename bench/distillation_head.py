"""Speed of distillation in the head on one GPU: python -m bench.distillation_head [--tokens 8192] [--peers ceiling Liger]

A student of 7B and a teacher of 32B by default: divergence, dX and dW. Ours against a ceiling (the four matrix products by
cuBLAS in bfloat16 and nothing else), torch.compile over chunks, and Liger's fused losses where installed, each pair
interleaved in one process. Before a pair half of the free memory is filled with NaN. Memory: beyond inputs, dX and one
float32 dW; allowed: 1.25 x that of the plain training head, plus a chunk of the teacher's logits. Errors: of dX, against
float64 on some rows.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.given import device, positive, run_main
from bench.harness import RESULTS, Case, compare, surroundings
from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels import divergence as plain_divergence, reference
from dovetail.kernels.divergence import Kind
from dovetail.kernels.registry import KernelSet, kernels_for
from dovetail.nn.distillation import ROW, TeacherStates
from dovetail.nn.heads import VocabShard, fused_loss
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from dovetail.rl.algorithms.distillation import DistillationLoss

GIB = 2**30
CHECKED = 64  # rows compared with float64
ALLOWED_TIME, ALLOWED_MEMORY = 1.15, 1.25
CASES: tuple[tuple[str, Kind, float, int], ...] = (
    ("jsd", "jsd", 0.5, 0),
    ("forward_kl", "forward_kl", 0.0, 0),
    ("reverse_kl", "reverse_kl", 1.0, 0),
    ("forward_kl, top 64", "forward_kl", 0.0, 64),
)
Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One pair. Milliseconds are medians; ratio: ours / peer of interleaved runs, so below 1 ours is faster."""

    what: str
    peer: str
    ours_ms: float
    peer_ms: float
    ratio: float
    ours_extra_gib: float
    peer_extra_gib: float
    allowed_gib: float
    ours_error: float
    peer_error: float | None


@dataclass(frozen=True)
class Work:
    x: Tensor
    weight: Tensor
    teacher: TeacherStates
    batch: PackedBatch
    kernels: KernelSet
    beta: float = 0.5

    @classmethod
    def random(
        cls, tokens: int, widths: tuple[int, int], vocab: int, chunk: int | None, on: torch.device
    ) -> "Work":
        torch.manual_seed(0)
        half, kernels = torch.bfloat16, kernels_for(on)

        def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, device=on).mul_(scale).to(half)

        x = normal(tokens, widths[0]).requires_grad_()
        weight = normal(vocab, widths[0], 1.2 * widths[0] ** -0.5).requires_grad_()
        teacher = TeacherStates(
            normal(tokens, widths[1]), normal(vocab, widths[1], 1.2 * widths[1] ** -0.5), vocab
        )
        batch = (
            PackedBatch.pack([torch.randint(vocab, (tokens + 1,))])
            .to(on)
            .compact(torch.arange(tokens, device=on))
        )
        batch = batch.with_fields(**{ROW: torch.arange(tokens, device=on)})
        return cls(
            x, weight, teacher, batch, replace(kernels, head_chunk=chunk or kernels.head_chunk)
        )

    @property
    def shard(self) -> VocabShard:
        return VocabShard(self.weight, 0, Axis("tp"), Products(self.kernels))

    def gradients(self, total: Tensor) -> Gradients:
        return torch.autograd.grad(total, (self.x, self.weight))

    @property
    def plain(self) -> "Work":
        """With passes over the logits by torch's operations."""
        own = {name: vars(reference)[name] for name in ("vocab_stats", "vocab_grad_")}
        own |= {
            name: vars(plain_divergence)[name] for name in ("divergence_sums", "divergence_grad_")
        }
        return replace(self, kernels=replace(self.kernels, head=None, **own))


def ours(work: Work, kind: Kind, top_k: int) -> Gradients:
    loss = DistillationLoss(teacher=work.teacher, divergence=kind, beta=work.beta, top_k=top_k)
    return work.gradients(loss.in_head(work.x, work.shard, work.batch, loss).total)


class Likelihood:
    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        return Loss(-stats.logprob.sum(), batch.mask.sum())


def plain_head(work: Work) -> Gradients:
    return work.gradients(fused_loss(work.x, work.shard, work.batch, Likelihood()).total)


def products(work: Work, dz: Tensor) -> None:
    dx, dw = torch.empty_like(work.x), torch.empty_like(work.weight)
    with torch.no_grad():
        for rows, states in zip(
            work.x.split(len(dz)), work.teacher.hidden.split(len(dz)), strict=True
        ):
            out = dz[: len(rows)]
            torch.mm(states, work.teacher.weight.T, out=out)
            torch.mm(rows, work.weight.T, out=out)
            torch.mm(out, work.weight, out=dx[: len(rows)])
            torch.mm(out.T, rows, out=dw)


def divergence_of(z: Tensor, w: Tensor, beta: float) -> Tensor:
    """Summed, from logits, as TRL has it."""
    a, b = (
        logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        for logits in (z, w)
    )
    if beta == 0:
        return (b.exp() * (b - a)).sum()
    if beta == 1:
        return (a.exp() * (a - b)).sum()
    m = (beta * b.exp() + (1 - beta) * a.exp()).log()
    return beta * (b.exp() * (b - m)).sum() + (1 - beta) * (a.exp() * (a - m)).sum()


def in_chunks(work: Work, compiled: Callable[..., Tensor], size: int) -> Gradients:
    """What a user writes: a chunk's logits by torch.compile, gradients added up in float32."""
    dx, dw = torch.empty_like(work.x), torch.zeros_like(work.weight, dtype=torch.float32)
    for start in range(0, len(work.x), size):
        rows = slice(start, start + size)
        x = work.x[rows].detach().requires_grad_()
        total = compiled(x, work.weight, work.teacher.hidden[rows], work.teacher.weight, work.beta)
        dx[rows], part = torch.autograd.grad(total, (x, work.weight))
        dw += part
    return dx, dw


def peers(work: Work, top_k: int) -> Iterator[tuple[str, Callable[[], Gradients]]]:
    if top_k:
        return
    compiled = torch.compile(
        lambda x, weight, h, other, beta: divergence_of(x @ weight.T, h @ other.T, beta)
    )
    for size in (1024, 4096):
        yield f"torch.compile, chunks of {size}", partial(in_chunks, work, compiled, size)
    if importlib.util.find_spec("liger_kernel") is None:
        return
    given = (work.x, work.weight, work.teacher.hidden, work.teacher.weight)
    liger: Any = importlib.import_module("liger_kernel.transformers.fused_linear_jsd")
    whole = liger.LigerFusedLinearJSD(jsd_beta=work.beta)
    yield "Liger FusedLinearJSD", lambda: work.gradients(whole(*given, None) * len(work.x))
    if 0 < work.beta < 1:
        chunked: Any = importlib.import_module("liger_kernel.chunked_loss")
        part = chunked.LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=work.beta
        )
        biases = [None] * (
            len(inspect.signature(part.forward).parameters) - 5
        )  # not in every release
        yield (
            "Liger chunked JSD",
            lambda: work.gradients(part(*given, work.batch.targets, *biases) * len(work.x)),
        )


def poisoned(run: Callable[[], Any], on: torch.device, share: float = 0.5) -> Callable[[], Any]:
    """Until the device is done."""

    def until_done() -> Any:
        result = run()
        if on.type == "cuda":
            torch.cuda.synchronize()
        return result

    if on.type == "cuda":
        torch.empty(int(share * torch.cuda.mem_get_info()[0]) // 4, device=on).fill_(float("nan"))
    return until_done


def extra_gib(work: Work, run: Callable[[], object]) -> float:
    if work.x.device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round(
        (torch.cuda.max_memory_allocated() - before - work.x.nbytes - 4 * work.weight.numel())
        / GIB,
        2,
    )


def error_of(work: Work, dx: Tensor) -> float:
    """The largest deviation of dX from float64 over its largest number; NaN shows memory that was never written."""
    some = torch.linspace(0, len(work.x) - 1, CHECKED, device=work.x.device).long()
    x = work.x[some].detach().double().requires_grad_()
    z, w = (
        x @ work.weight.detach().double().T,
        work.teacher.hidden[some].double() @ work.teacher.weight.double().T,
    )
    (want,) = torch.autograd.grad(divergence_of(z, w, work.beta), x)
    return (
        float((dx[some] - want).abs().max() / want.abs().max())
        if bool(dx.isfinite().all())
        else float("nan")
    )


def rows_of(
    work: Work, name: str, kind: Kind, top_k: int, rounds: int, only: list[str]
) -> Iterator[Row]:
    on, chunk = work.x.device, min(work.kernels.head_chunk, len(work.x))
    dz = torch.empty(chunk, len(work.weight), device=on, dtype=work.x.dtype).normal_()
    found: list[tuple[str, Callable[[], Any]]] = [
        ("ceiling: four products", lambda: products(work, dz))
    ]
    if not top_k:
        found.append(("ours, passes by torch", lambda: ours(work.plain, kind, top_k)))
    found += peers(work, top_k)

    def own() -> Gradients:
        return ours(work, kind, top_k)

    extra = extra_gib(work, own)
    allowed = (
        ALLOWED_MEMORY * extra_gib(work, lambda: plain_head(work))
        + 4 * chunk * len(work.weight) / GIB
    )
    own_error = float("nan") if top_k else error_of(work, poisoned(own, on)()[0])
    for peer, run in found:
        if only and not peer.startswith(tuple(only)):
            continue
        first = poisoned(run, on)()
        error = error_of(work, first[0]) if isinstance(first, tuple) and not top_k else None
        del first
        one = compare(Case(peer, len(work.x), poisoned(own, on), poisoned(run, on)), rounds)
        milliseconds = (round(1e3 * one.ours_seconds, 2), round(1e3 * one.peer_seconds, 2))
        memory = (extra, extra_gib(work, run), round(allowed, 2))
        yield Row(name, peer, *milliseconds, round(1 / one.ratio, 3), *memory, own_error, error)


def main() -> None:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.distillation_head", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument(
        "--width", type=positive, default=3584, help="of the student; 3584: Qwen2.5-7B"
    )
    parser.add_argument("--teacher-width", type=positive, default=5120, help="5120: Qwen2.5-32B")
    parser.add_argument("--vocab", type=positive, default=152064)
    parser.add_argument("--chunk", type=positive, help="tokens; default: the kernels' own")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[],
        help="starts of the names of peers; default: all installed",
    )
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "distillation_head.json")
    given = parser.parse_args()
    widths = (given.width, given.teacher_width)
    work = Work.random(given.tokens, widths, given.vocab, given.chunk, torch.device(given.device))
    print(
        f"kernels: {work.kernels.describe().get('head')}, {work.kernels.describe()['divergence_sums']}",
        flush=True,
    )
    found: list[Row] = []
    for name, kind, beta, top_k in CASES:
        for row in rows_of(replace(work, beta=beta), name, kind, top_k, given.rounds, given.peers):
            found.append(row)
            print(line(row), flush=True)
    result = {
        "bench": "distillation_head",
        **surroundings(),
        **vars(given),
        "results": [asdict(row) for row in found],
    }
    given.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def line(row: Row) -> str:
    error = "" if row.peer_error is None else f" {row.peer_error:.1e}"
    goal = (
        ""
        if not row.peer.startswith("ceiling")
        else ("  ok" if row.ratio <= ALLOWED_TIME else "  MISSED")
    )
    return (
        f"{row.what:18} ours {row.ours_ms:8.2f} ms {row.ours_extra_gib:6.2f} of {row.allowed_gib:6.2f} GiB "
        f"{row.ours_error:.1e} | {row.peer:28} {row.peer_ms:8.2f} ms {row.peer_extra_gib:6.2f} GiB{error}  x{row.ratio}{goal}"
    )


if __name__ == "__main__":
    run_main(main)
