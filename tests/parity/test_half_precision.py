"""bfloat16 computation with float32 masters: as near the float32 model as transformers in bfloat16 is."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.parity_configs import VOCAB, save_tiny, tiny_configs
from tests.helpers.parity_reference import objective, rows_of
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import HALF_SHARE, P99

NAMES = ("llama", "mistral_window", "qwen2", "qwen3_tied")
FEW = ("qwen3_tied",)
Flat = dict[str, Tensor]


def batch() -> PackedBatch:
    """Enough tokens for a 99th percentile."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(20, 80, (24,), generator=draw).tolist()
    packed = PackedBatch.pack([torch.randint(VOCAB, (n,), generator=draw) for n in lengths])
    w0, w1 = torch.randn(2, len(packed), generator=draw)
    return packed.with_fields(w0=w0, w1=w1)


def ours(folder: Path, layout: Layout, names: tuple[str, ...]) -> dict[str, Flat]:
    """Models on one layout, computed in bfloat16."""
    found = {}
    for name in names:
        options = EngineOptions(optim=PROBE, tokens_per_batch=640)
        engine = from_pretrained(
            folder / name, layout=layout, dtype=torch.bfloat16, device="cpu", options=options
        )
        found[name] = engine.score(batch())._asdict()
        engine.train_step(batch(), objective)
        found[name]["gradient"] = torch.cat(
            [g.flatten() for _, g in sorted(gradients(engine)[0].items())]
        )
    return found


def theirs(model: PreTrainedModel, stats_dtype: torch.dtype = torch.float32) -> Flat:
    """transformers in the model's dtype; statistics of its logits in `stats_dtype`."""
    packed = batch()
    keep = packed.mask
    logprobs = (
        torch.cat([model(row[None]).logits[0] for row in rows_of(packed)])
        .to(stats_dtype)
        .log_softmax(-1)
    )
    entropy = -(logprobs.exp() * logprobs).sum(-1) * keep
    stats = TokenStats(logprobs.gather(-1, packed.targets[:, None])[:, 0] * keep, entropy)
    loss = objective(
        TokenStats(stats.logprob[keep], stats.entropy[keep]), packed.compact(keep.nonzero()[:, 0])
    )
    (loss.total / loss.count).backward()
    grads = [p.grad.flatten() for _, p in sorted(model.named_parameters())]
    return {name: x.detach() for name, x in stats._asdict().items()} | {
        "gradient": torch.cat(grads)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        save_tiny(tiny_configs()[name], folder / name)
    return folder


@pytest.fixture(scope="module")
def references(folder: Path) -> Callable[[str], tuple[Flat, Flat]]:
    """Of a model transformers in float32 and in bfloat16."""

    def both(name: str) -> tuple[Flat, Flat]:
        model = save_tiny(tiny_configs()[name], folder / name)
        exact = theirs(model)
        model.zero_grad()
        return exact, theirs(torch.nn.Module.to(model, torch.bfloat16))

    return cache(both)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("dp=1", NAMES[:2]),
        ("tp=2,dp=2", FEW),
        *(
            pytest.param(layout, NAMES, marks=pytest.mark.soak)
            for layout in ("dp=1", "tp=2,dp=2", "pp=2,cp=2")
        ),
    ],
)
def test_error_is_at_most_that_of_transformers(
    folder: Path,
    references: Callable[[str], tuple[Flat, Flat]],
    layout: str,
    names: tuple[str, ...],
) -> None:
    """Mean and 99th percentile of log-probs, entropies and all gradients."""
    parsed = Layout.parse(layout)
    found = run(parsed.num_ranks, ours, folder, parsed, names)[0]
    for name in names:
        exact, half = references(name)
        for what, expected in exact.items():
            allowed, got = (
                permute_tokens(half[what], expected),
                permute_tokens(found[name][what], expected),
            )
            for kind, here, there in zip(("mean", "99th percentile"), got, allowed, strict=True):
                assert 0.0 < here <= HALF_SHARE * there, (
                    f"{name}: {kind} error of {what} {here:.2e}, theirs {there:.2e}"
                )


def test_statistics_in_bfloat16_would_be_noticed(
    folder: Path, references: Callable[[str], tuple[Flat, Flat]]
) -> None:
    """The mutation: the same logits, but their log-softmax and entropy in half precision."""
    model = save_tiny(tiny_configs()["llama"], folder / "llama")
    wrong = theirs(torch.nn.Module.to(model, torch.bfloat16), torch.bfloat16)
    exact, half = references("llama")
    for what in ("logprob", "entropy"):
        assert (
            permute_tokens(wrong[what], exact[what])[0]
            > HALF_SHARE * permute_tokens(half[what], exact[what])[0]
        )


def permute_tokens(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """Mean and 99th percentile of |x - exact|."""
    error = (x.to(torch.float64) - exact.to(torch.float64)).abs()
    return float(error.mean()), float(error.kthvalue(int(P99 * len(error))).values)
