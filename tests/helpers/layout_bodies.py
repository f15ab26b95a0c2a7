"""What one rank does in the training tests: engines of one tiny model on a layout, and what they give."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from tests.helpers.parity_configs import VOCAB
from tests.helpers.parity_reference import LENGTHS, make_batch, objective
from tests.helpers.probe import PROBE, gradients, parameters

BUDGET = max(LENGTHS) + 10
ADAMW = OptimSettings(
    lr=1e-3, weight_decay=0.1, clip_norm=0.05, schedule="cosine", warmup_steps=1, total_steps=8
)
STEPS = 10

Flat = dict[str, Tensor]


def made(
    path: Path, layout: Layout, optim: OptimSettings = PROBE, budget: int | None = BUDGET
) -> Engine:
    """An engine in float64."""
    options = EngineOptions(optim=optim, tokens_per_batch=budget)
    return from_pretrained(path, layout=layout, dtype=torch.float64, device="cpu", options=options)


def sequencewise(stats: TokenStats, batch: PackedBatch) -> Loss:
    """A ratio of whole sequences, clipped from above (GSPO), summed over sequences that have a counted token."""
    ids, n = batch.sequence_ids, batch.num_sequences
    counts = torch.bincount(ids, minlength=n)
    means = stats.logprob.new_zeros(n).index_add(
        0, ids, stats.logprob - batch.fields["w1"]
    ) / counts.clamp(min=1)
    ratios = means[counts > 0].exp()
    return Loss(torch.minimum(ratios, ratios.new_tensor(0.05)).sum(), (counts > 0).sum())


def everything(
    path: Path, layout: Layout, budget: int | None = BUDGET, *, wrong: bool = False
) -> Flat:
    """Statistics, loss, norm, gradients of four steps, and what two clipped AdamW steps leave, in float64.

    wrong: no rank counts itself the owner of less than it holds, so the norm counts copies of a piece again.
    """
    batch = make_batch(torch.float64)
    found: Flat = {}
    engine = made(path, layout, budget=budget)
    asked: dict[str, tuple[PackedBatch, LossFn]] = {
        "all": (batch, objective),
        "few": (batch.select([2, 4]), objective),
        "one": (batch.select([3]), objective),
        "gspo": (batch, sequencewise),
    }
    for name, (each, loss) in asked.items():
        logprob, entropy = engine.score(each)
        report = engine.train_step(each, loss)
        sums = torch.tensor([report.loss, report.grad_norm], dtype=torch.float64)
        found |= {f"{name}.logprob": logprob, f"{name}.entropy": entropy}
        found |= {f"{name}.loss": sums[:1], f"{name}.norm": sums[1:]}
        grads, stray = gradients(engine)
        assert stray == 0.0, f"ranks that hold the same piece differ by {stray}"
        found |= {f"{name}.grad.{key}": grad for key, grad in grads.items()}
    engine = made(path, layout, ADAMW, budget)
    if wrong:
        shards = engine.optimizer.shards
        engine.optimizer.shards = [
            replace(s, regions=tuple(replace(r, owned=True) for r in s.regions)) for s in shards
        ]
    for _ in range(2):
        engine.train_step(batch, objective)
    if wrong:
        engine.optimizer.shards = shards
    weights, stray = parameters(engine)
    assert stray == 0.0, f"ranks that hold the same piece differ by {stray}"
    return found | {f"trained.{name}": weight for name, weight in weights.items()}


def tokenwise(stats: TokenStats, batch: PackedBatch) -> Loss:
    """Supervised fine-tuning: minus the log-prob."""
    return Loss(-stats.logprob.sum(), batch.mask.sum())


def mean_of_means(stats: TokenStats, batch: PackedBatch) -> Loss:
    """The mistake that sums prevent: every micro-batch's mean counts the same."""
    return Loss(-stats.logprob.mean() if len(batch) else stats.logprob.sum(), torch.tensor(1))


def curve(path: Path, layout: Layout, budget: int | None, *, wrong: bool = False) -> Tensor:
    """[steps, 2]: loss and gradient norm of float32 fine-tuning on a fresh ragged batch a step."""
    options = EngineOptions(optim=OptimSettings(lr=1e-3, clip_norm=1.0), tokens_per_batch=budget)
    engine = from_pretrained(path, layout=layout, device="cpu", options=options)
    rows = []
    for step in range(STEPS):
        report = engine.train_step(ragged(step), mean_of_means if wrong else tokenwise)
        rows.append([report.loss, report.grad_norm])
    return torch.tensor(rows, dtype=torch.float64)


def curves(path: Path, layout: Layout, budgets: Sequence[int | None]) -> list[Tensor]:
    return [curve(path, layout, budget) for budget in budgets]


def ragged(seed: int, sequences: int = 9, longest: int = 24) -> PackedBatch:
    """Sequences of 1 to `longest` tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (sequences,), generator=draw).tolist()
    return PackedBatch.pack([torch.randint(VOCAB, (n,), generator=draw) for n in lengths])
