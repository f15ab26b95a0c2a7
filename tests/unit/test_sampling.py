"""Sampling from logits: counter-based noise, the distribution of draws, bans, top-k and top-p, the inverse CDF."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.sampler.base import SamplingParams
from dovetail.sampler.sampling import cut, draw, inverse_cdf, uniforms
from tests.helpers.tolerances import MODEL_FP32, assert_close

CHI_SQUARE_LIMIT = {
    2: 13.8,
    5: 20.5,
    11: 31.3,
}  # exceeded once in a thousand draws, by degrees of freedom


def test_noise_is_golden_and_every_key_matters() -> None:
    rows, samples = np.array([0, 0, 1, 7]), np.array([0, 1, 0, 3])
    assert uniforms(0, 0, rows, samples, 0).tolist() == GOLDEN_AT_ZERO
    assert uniforms(-5, 12, rows, samples, 300).tolist() == GOLDEN_ELSEWHERE
    grid = np.arange(20)
    r, s = (x.ravel() for x in np.meshgrid(grid, grid))
    keys = [
        (seed, step, position) for seed in range(3) for step in range(3) for position in range(6)
    ]
    drawn = np.concatenate([uniforms(seed, step, r, s, position) for seed, step, position in keys])
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount((drawn * 12).astype(int), minlength=12)
    assert chi_square(counts, np.full(12, 1 / 12)) < CHI_SQUARE_LIMIT[11]
    ordered = drawn.reshape(len(keys), -1)
    assert abs(np.corrcoef(ordered[:-1].ravel(), ordered[1:].ravel())[0, 1]) < 4 / math.sqrt(
        len(drawn)
    )


GOLDEN_AT_ZERO = [0.47141042966848024, 0.17732475569272, 0.2380165699112271, 0.1415867710518045]
GOLDEN_ELSEWHERE = [0.883102083828125, 0.9344168812870338, 0.652114914860066, 0.6487602963747291]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept", "freedom"),
    [
        (0, 1.0, 0.0, 12, 11),
        (6, 1.0, 0.0, 6, 5),
        (0, 0.6, 0.0, 3, 2),
        (6, 0.7, 0.0, 3, 2),
        (100, 1.0, 0.0, 12, 11),
        (0, 1.0, 0.25, 3, 2),
    ],
)
def test_draws_follow_the_distribution(
    top_k: int, top_p: float, min_p: float, kept: int, freedom: int
) -> None:
    z = torch.randn(12, generator=torch.Generator().manual_seed(11)) * 1.5
    n, temperature = 40_000, 1.4
    p = (z.double() / temperature).softmax(-1)
    by_weight = p.argsort(descending=True)
    expected = torch.zeros_like(p)
    expected[by_weight[:kept]] = p[by_weight[:kept]]
    noise = torch.from_numpy(uniforms(1, 2, np.arange(n), np.zeros(n, np.int64), 3))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, log_probs = draw(z.expand(n, -1), noise, params)
    counts = torch.bincount(ids, minlength=12)
    assert counts[expected == 0].sum() == 0
    assert (
        chi_square(counts.numpy(), (expected / expected.sum()).numpy()) < CHI_SQUARE_LIMIT[freedom]
    )
    assert_close(log_probs, p.log()[ids], MODEL_FP32, "log-probs before the cuts")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("gap", [1.0, 500.0])
def test_banned_ids_are_never_drawn(temperature: float, gap: float) -> None:
    """Though they are the likeliest, by much; log-probs are those of the model without the ban."""
    z = torch.randn(12, generator=torch.Generator().manual_seed(11))
    z[[2, 7]] = z.max() + gap
    n = 4000
    noise = torch.from_numpy(uniforms(1, 2, np.arange(n), np.zeros(n, np.int64), 3))
    params = SamplingParams(temperature=temperature, banned_ids=(2, 7))
    ids, log_probs = draw(z.expand(n, -1), noise, params)
    allowed = z.clone()
    allowed[[2, 7]] = -torch.inf
    counts = torch.bincount(ids, minlength=12)
    if temperature:
        assert (
            chi_square(counts.numpy(), (allowed.double() / temperature).softmax(-1).numpy())
            < CHI_SQUARE_LIMIT[11]
        )
    else:
        assert ids.unique().tolist() == [int(allowed.argmax())]
    p = (z.double() / (temperature or 1.0)).log_softmax(-1)
    assert_close(log_probs, p[ids], MODEL_FP32, "log-probs before the ban")


def nucleus_by_sorting(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """The definition, for weights without ties: sort, keep k, keep until the mass is reached."""
    order = weights.argsort(-1, descending=True)
    kept = weights.gather(1, order)[:, : top_k or None]
    before = kept.cumsum(-1) - kept
    kept = torch.where(before < top_p * kept.sum(-1, keepdim=True), kept, 0.0)
    return torch.zeros_like(weights).scatter(1, order[:, : kept.shape[1]], kept)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.05), (0, 0.5), (0, 0.999), (50, 1.0), (50, 0.9), (1, 1.0), (0, 1e-9)]
)
@pytest.mark.parametrize("columns", [131, 5000])
def test_cut_equals_its_definition_by_sorting(columns: int, top_k: int, top_p: float) -> None:
    weights = (
        torch.randn(7, columns, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        .mul(2)
        .exp()
    )
    assert torch.equal(cut(weights, top_k, top_p), nucleus_by_sorting(weights, top_k, top_p))


def test_the_nucleus_of_a_row_is_its_own() -> None:
    """The row whose nucleus is the first token's leaves that of a flat row whole: 3,905 ids."""
    draw = torch.Generator().manual_seed(0)
    flat = torch.rand(5000, generator=draw, dtype=torch.float64) + 0.5
    peaked = flat.clone()
    peaked[3] = 1e9
    weights = torch.stack([peaked, flat])
    found = cut(weights, 0, 0.85)
    assert torch.equal(found, nucleus_by_sorting(weights, 0, 0.85))
    for row, alone in zip(found, weights, strict=True):
        assert torch.equal(row, cut(alone[None], 0, 0.85)[0])
    assert found.count_nonzero(-1).tolist()[0] == 1 and int(found[1].count_nonzero()) > 2048


def test_tied_tokens_stay_or_go_together() -> None:
    weights = torch.tensor([[1.0, 4.0, 2.0, 2.0, 0.5]])
    assert cut(weights, 2, 1.0).tolist() == [[0.0, 4.0, 2.0, 2.0, 0.0]]


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 3000])
def test_inverse_cdf_equals_its_definition_and_never_takes_weight_zero(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weights = torch.rand(400, columns, generator=generator)
    weights *= torch.rand(400, columns, generator=generator) < 0.3
    weights[torch.arange(400), torch.randint(0, columns, (400,), generator=generator)] = 1e-3
    noise = torch.rand(400, generator=generator, dtype=torch.float64)
    noise[:3] = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    found = inverse_cdf(weights, noise)
    assert (weights.gather(1, found[:, None]) > 0).all()
    running = weights.double().cumsum(-1)
    expected = (running <= (noise * running[:, -1])[:, None]).sum(-1)
    assert (found == expected)[3:].all()
    positive = weights > 0
    assert torch.equal(found[0], positive[0].int().argmax())
    assert torch.equal(found[1], columns - 1 - positive[1].flip(0).int().argmax())
