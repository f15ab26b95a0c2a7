"""Speed of the head on a GPU, log-prob and entropy of 7B-sized vocabularies: python -m bench.head [--tokens 32768 8192]

Ours against a ceiling (the same matrix products by cuBLAS, nothing else) and against peers that are installed, each pair
interleaved in one process. Beside the times: memory beyond x, W, dX and one float32 dW, and the error of the log-probs
against float64. Liger's and cut-cross-entropy's losses have no entropy: they do less than is asked of ours.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.given import positive, run_main
from bench.harness import RESULTS, Case, compare, surroundings
from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels import reference
from dovetail.kernels.registry import kernels_for
from dovetail.nn.heads import VocabShard, fused_loss, fused_token_stats
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from dovetail.parallel.process_group import pick_device

GIB = 2**30
ENTROPY = 0.01  # weight of the entropy in the loss
CHECKED = 256  # rows compared with float64
DEVIATIONS = (1.2, 3.0)  # of logits: a model at its start, and one as peaked as trained ones are


@dataclass(frozen=True)
class Row:
    """One pair. Milliseconds are medians of runs that alternate; ratio: peer / ours, so above 1 ours is faster."""

    what: str
    peer: str
    tokens: int
    chunk: int
    ours_ms: float
    peer_ms: float
    ratio: float
    ours_extra_gib: float
    peer_extra_gib: float
    ours_tflops: float


@dataclass(frozen=True)
class Work:
    """What is computed: hidden states, the head, targets and advantages of `tokens` tokens."""

    x: Tensor
    weight: Tensor
    batch: PackedBatch
    chunk: int
    plain: bool = False  # whether the passes over the logits are torch's operations

    @classmethod
    def random(
        cls, tokens: int, sizes: tuple[int, int], chunk: int, device: torch.device, deviation: float
    ) -> "Work":
        """`sizes`: width and vocabulary; `deviation`: of the logits."""
        width, vocab = sizes
        torch.manual_seed(0)
        half = torch.bfloat16
        x = torch.randn(tokens, width, device=device).to(half).requires_grad_()
        weight = (
            torch.randn(vocab, width, device=device)
            .mul_(deviation * width**-0.5)
            .to(half)
            .requires_grad_()
        )
        batch = PackedBatch.pack([torch.randint(vocab, (tokens + 1,))]).to(device)
        batch = batch.with_fields(advantage=torch.randn(tokens + 1, device=device))
        return cls(x, weight, batch.compact(torch.arange(tokens, device=device)), chunk)

    @property
    def shard(self) -> VocabShard:
        kernels = replace(kernels_for(self.x.device), head_chunk=self.chunk)
        if self.plain:
            kernels = replace(
                kernels,
                head=None,
                vocab_stats=reference.vocab_stats,
                vocab_grad_=reference.vocab_grad_,
            )
        return VocabShard(self.weight, 0, Axis("tp"), Products(kernels))

    def gradients(self, total: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(total, (self.x, self.weight))

    def policy(self, logprob: Tensor, entropy: Tensor) -> Tensor:
        return -(logprob * self.batch.fields["advantage"] + ENTROPY * entropy).sum()


class Policy:
    """A policy gradient with an entropy bonus: needs both statistics and both of their gradients."""

    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        total = -(stats.logprob * batch.fields["advantage"] + ENTROPY * stats.entropy).sum()
        return Loss(total, batch.mask.sum())


class WholePolicy(Policy):
    """The same through the path of losses that need whole sequences: four products a token."""

    separable = False


def train(work: Work, loss: Policy) -> tuple[Tensor, ...]:
    return work.gradients(fused_loss(work.x, work.shard, work.batch, loss).total)


def score(work: Work) -> TokenStats:
    return fused_token_stats(work.x, work.shard, work.batch)


def products(work: Work, dz: Tensor, *, backward: bool) -> None:
    """The ceiling: the products of all chunks by cuBLAS in bfloat16, on random numbers, and nothing else."""
    dx, dw = torch.empty_like(work.x), torch.empty_like(work.weight)
    with torch.no_grad():
        for rows in work.x.split(len(dz)):
            out = dz[: len(rows)]
            torch.mm(rows, work.weight.T, out=out)
            if backward:
                torch.mm(out, work.weight, out=dx[: len(rows)])
                torch.mm(out.T, rows, out=dw)


def compiled_statistics() -> Callable[..., tuple[Tensor, Tensor]]:
    """What a user of torch.compile writes: full logits, kept for the backward."""

    def statistics(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        z = (x @ weight.T).to(torch.float32)
        lse = z.logsumexp(-1)
        entropy = lse - (torch.softmax(z, -1) * z).sum(-1)
        return z.gather(-1, targets[:, None])[:, 0] - lse, entropy

    return torch.compile(statistics, dynamic=False)


def with_entropy(work: Work) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
    """Peers that give what ours gives: log-probs and entropies."""
    given = (work.x, work.weight, work.batch.targets)
    statistics = compiled_statistics()
    yield "torch.compile, logits kept", lambda: statistics(*given)
    verl = _installed("verl.utils.kernel.linear_cross_entropy")
    if verl is not None:
        yield "verl, Triton kernel", lambda: verl.linear_cross_entropy(*given, 1.0, "none")


def peers(work: Work, *, backward: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every peer that is installed, as a run of one pass."""
    x, weight, targets = work.x, work.weight, work.batch.targets
    for name, run in with_entropy(work):
        yield (
            name,
            (lambda run=run: work.gradients(work.policy(*run())))
            if backward
            else _without_gradient(run),
        )
    if not backward:
        return
    liger = _installed("liger_kernel.transformers")
    if liger is not None:
        summed = liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")
        yield "Liger FLCE (sum, no entropy)", lambda: work.gradients(summed(weight, x, targets))
    apple = _installed("cut_cross_entropy")
    if apple is not None:
        yield (
            "cut-cross-entropy (no entropy)",
            lambda: work.gradients(apple.linear_cross_entropy(x, weight, targets, reduction="sum")),
        )


def _without_gradient(run: Callable[[], object]) -> Callable[[], object]:
    def quiet() -> object:
        with torch.no_grad():
            return run()

    return quiet


def _installed(name: str) -> Any:
    return (
        importlib.import_module(name) if importlib.util.find_spec(name.partition(".")[0]) else None
    )


def rows(work: Work, rounds: int, *, backward: bool, only: list[str]) -> Iterator[Row]:
    """Ours against the ceiling, then against each peer whose name starts with one of `only`; all of them without any."""
    tokens, (vocab, width) = len(work.x), work.weight.shape
    flops = (6 if backward else 2) * tokens * vocab * width
    dz = torch.randn(min(work.chunk, tokens), vocab, device=work.x.device, dtype=work.x.dtype)
    found: list[tuple[str, Callable[[], object]]] = [
        ("ceiling: the products alone", lambda: products(work, dz, backward=backward))
    ]
    if backward:
        found.append(("ours, four products", lambda: train(work, WholePolicy())))
        found.append(("ours, passes by torch", lambda: train(replace(work, plain=True), Policy())))
    found += peers(work, backward=backward)
    ours: Callable[[], object] = (
        (lambda: train(work, Policy())) if backward else (lambda: score(work))
    )
    extra = _extra_gib(work, ours, backward=backward)
    for peer, run in found:
        if only and not peer.startswith(tuple(only)):
            continue
        one = compare(Case(peer, tokens, _waited(ours), _waited(run)), rounds)
        yield Row(
            what="forward + backward" if backward else "forward",
            peer=peer,
            tokens=tokens,
            chunk=work.chunk,
            ours_ms=round(1e3 * one.ours_seconds, 2),
            peer_ms=round(1e3 * one.peer_seconds, 2),
            ratio=round(one.ratio, 3),
            ours_extra_gib=extra,
            peer_extra_gib=_extra_gib(work, run, backward=backward),
            ours_tflops=round(flops / one.ours_seconds / 1e12, 1),
        )


def _waited(run: Callable[[], object]) -> Callable[[], object]:
    """A run that ends when the device has."""

    def until_done() -> None:
        run()
        torch.cuda.synchronize()

    return until_done


def _extra_gib(work: Work, run: Callable[[], object], *, backward: bool) -> float:
    """Most memory beyond what was held before and, for a backward, dX and one float32 dW."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    gradients = work.x.nbytes + 4 * work.weight.numel() if backward else 0
    return round((torch.cuda.max_memory_allocated() - before - gradients) / GIB, 2)


def errors(work: Work, found: TokenStats) -> dict[str, float]:
    """The largest error of log-prob and entropy against float64, over rows from the whole batch, in nats."""
    some = torch.linspace(0, len(work.x) - 1, CHECKED, device=work.x.device).long()
    with torch.no_grad():
        every = (work.x[some].to(torch.float64) @ work.weight.to(torch.float64).T).log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    logprob = every.gather(-1, work.batch.targets[some, None])[:, 0]
    return {
        "logprob": float((found.logprob[some] - logprob).abs().max()),
        "entropy": float((found.entropy[some] - entropy).abs().max()),
    }


def accuracies(work: Work) -> dict[str, dict[str, float]]:
    """Of ours and of the peers that know entropies."""
    with torch.no_grad():
        others = {name: TokenStats(*run()) for name, run in with_entropy(work)}
        return {
            name: errors(work, found) for name, found in {"ours": score(work), **others}.items()
        }


def main() -> None:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.head", description=__doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[32768, 8192])
    parser.add_argument(
        "--chunks",
        type=positive,
        nargs="*",
        default=[],
        help="tokens a chunk; default: the kernels' own",
    )
    parser.add_argument("--width", type=positive, default=3584)
    parser.add_argument("--vocab", type=positive, default=152064)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[],
        help="starts of the names of peers; default: all installed",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "head_h200.json")
    given = parser.parse_args()
    device = pick_device("cuda")
    found: list[Row] = []
    accuracy: dict[str, dict[str, dict[str, float]]] = {}
    sizes = (given.width, given.vocab)
    for deviation in DEVIATIONS:
        accuracy[f"logits of deviation {deviation}"] = accuracies(
            Work.random(2048, sizes, 2048, device, deviation)
        )
    print(accuracy)
    for tokens in given.tokens:
        for chunk in given.chunks or [kernels_for(device).head_chunk]:
            work = Work.random(tokens, sizes, chunk, device, DEVIATIONS[0])
            for backward in (True, False):
                for row in rows(work, given.rounds, backward=backward, only=given.peers):
                    found.append(row)
                    print(line(row), flush=True)
    names = ("triton", "liger_kernel", "cut_cross_entropy", "verl")
    installed = {name: metadata.version(name) for name in names if importlib.util.find_spec(name)}
    result = {
        "bench": "head",
        **surroundings(),
        "peers": installed,
        "width": given.width,
        "vocab": given.vocab,
        "error_against_float64": accuracy,
        "results": [asdict(row) for row in found],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(given.out)


def line(row: Row) -> str:
    """What a person reads."""
    return (
        f"{row.what:18} {row.tokens:6} / {row.chunk:5}  ours {row.ours_ms:7.2f} ms {row.ours_extra_gib:6.2f} GiB "
        f"{row.ours_tflops:6.1f} TF/s   {row.peer:32} {row.peer_ms:7.2f} ms {row.peer_extra_gib:6.2f} GiB  x{row.ratio}"
    )


if __name__ == "__main__":
    run_main(main)
