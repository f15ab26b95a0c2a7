"""Batches and statistics for losses, and their formulas."""

import math

import torch
from torch import Tensor

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.rl.losses import (
    Aggregation,
    weight_fields,
)

F64 = torch.float64
LENGTHS = [4, 7, 1, 5, 3]
MASKS = [[0, 0, 1, 1], [0, 1, 1, 0, 0, 1, 1], [0], [0, 1, 1, 1, 1], [0, 0, 0]]


def full_batch(aggregation: Aggregation | None = None, constant: float = 1.0) -> PackedBatch:
    """Five sequences, one with a hole, one of one token, one without counted tokens; random fields."""
    rows = [
        Sequence([1] * n, mask=[bool(x) for x in m]) for n, m in zip(LENGTHS, MASKS, strict=True)
    ]
    batch = PackedBatch.pack(rows)
    generator = torch.Generator().manual_seed(2)

    def random(scale: float) -> Tensor:
        return torch.randn(len(batch), generator=generator, dtype=F64) * scale

    batch = batch.with_fields(
        old_logprob=random(0.5) - 2,
        reference_logprob=random(0.5) - 2,
        advantage=random(1.0),
        old_value=random(1.0),
        **{"return": random(1.0)},
    )
    return (
        batch.with_fields(**weight_fields(batch, aggregation, constant)) if aggregation else batch
    )


def counted(batch: PackedBatch) -> PackedBatch:
    return batch.compact(batch.mask.nonzero().flatten())


def random_stats(n: int, seed: int = 5) -> TokenStats:
    generator = torch.Generator().manual_seed(seed)
    logprob = torch.randn(n, generator=generator, dtype=F64) * 0.5 - 2
    return TokenStats(
        logprob.requires_grad_(), torch.rand(n, generator=generator, dtype=F64).requires_grad_()
    )


def clip_formula(
    logprob: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    ratio = math.exp(logprob - old)
    objective = min(ratio * advantage, max(1 - low, min(ratio, 1 + high)) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective
