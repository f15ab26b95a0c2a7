"""Accumulated batches, groups, frozen parameters, failed calls and saved states: on every layout as on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.errors import SecondaryFailure
from tests.helpers.harness import run
from tests.helpers.layout_bodies import tokenwise
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny_configs
from tests.helpers.tolerances import SUM_ORDER, assert_all_close, worst_error

LENGTHS = ((9, 5, 14, 3), (12, 4, 7, 6, 2))
GROUPS = (
    dt.ParamGroup("*.layers.1.*", lr=3e-3, weight_decay=0.2),
    dt.ParamGroup("*norm.weight", weight_decay=0.0),
)
BOTTOM = ("model.embed_tokens.weight", "model.layers.0.*")  # all that the first of two stages has
FROZEN = {
    "llama": BOTTOM,
    "llama_tied": ("lm_head.weight",),
    "qwen3_moe": ("*.layers.1.mlp.experts.*",),
}
LAYOUTS = {
    "llama": ("tp=2", "dp=2", "pp=2", "cp=2"),
    "llama_tied": ("pp=2",),
    "qwen3_moe": ("dp=2,ep=2",),
}


def made(path: Path, layout: str, frozen: tuple[str, ...]) -> Any:
    optim = dt.OptimSettings(
        lr=1e-3,
        weight_decay=0.1,
        groups=GROUPS,
        frozen=frozen,
        schedule="linear",
        total_steps=9,
        clip_norm=0.5,
    )
    balance = BalanceSettings(aux_coef=0.1, z_coef=0.01)
    options = dt.EngineOptions(optim=optim, tokens_per_batch=16, balance=balance)
    return dt.from_pretrained(
        path, layout=dt.Layout.parse(layout), dtype=torch.float64, device="cpu", options=options
    )


def batches() -> list[dt.PackedBatch]:
    draw = torch.Generator().manual_seed(2)
    return [
        dt.PackedBatch.pack([torch.randint(VOCAB, (n,), generator=draw) for n in part])
        for part in LENGTHS
    ]


def raising(*_: Any) -> dt.Loss:
    raise ArithmeticError("in the loss")


def train(
    path: Path,
    layout: str,
    frozen: tuple[str, ...],
    after: Path,
    before: Path | None = None,
    *,
    wrong: bool = False,
) -> dict[str, Tensor]:
    """Two steps of two batches each, with a failed call in each, and a sample.

    after: where the state after the first step is saved. before: where it is loaded from, in place of that step.
    """
    engine = made(path, layout, frozen)
    found: dict[str, Tensor] = {}
    for step in range(2):
        if step == 0 and before is not None:
            assert engine.load_state(before) == {"done": 1}
            engine.save_state(after, {"done": 1})
            continue
        if step == 1:
            engine.param_groups[0].lr = 5e-4
        engine.forward_backward(batches()[0], tokenwise)
        last = engine.mesh["pp"].rank == engine.mesh["pp"].size - 1
        with pytest.raises(
            ArithmeticError if last else SecondaryFailure, match=r"in the loss|stage 1 failed"
        ):
            engine.forward_backward(batches()[1], raising)
        for batch in batches():
            part = engine.forward_backward(batch, tokenwise)
            engine.score(batch)
        report = engine.optim_step(denominator=part.count if wrong else None)
        assert not report.skipped
        found["step"] = torch.tensor(
            [part.loss, report.loss, report.grad_norm, report.lr], dtype=torch.float64
        )
        if step == 0:
            engine.save_state(after, {"done": 1})
    engine.check_replicas()
    drawn = engine.generate([[1, 5, 7], [2, 9]], n=2, max_tokens=4)
    numbers = [[*each.ids, *each.log_probs] for each in drawn]
    found["drawn"] = torch.tensor(numbers, dtype=torch.float64)
    return found | {name: x.clone() for name, x in engine.weights(torch.float64)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_one_rank(name: str, tmp_path: Path) -> None:
    """Each goes on from the state that the one before it saved, the last one from the first step of one rank."""
    save_tiny((tiny_configs() | moe_configs())[name], tmp_path / "model")
    path, frozen = tmp_path / "model", FROZEN[name]
    expected = run(1, train, path, "tp=1", frozen, tmp_path / "one")[0]
    before = tmp_path / "one"
    for layout in LAYOUTS[name]:
        for found in run(2, train, path, layout, frozen, tmp_path / layout, before):
            assert_all_close(found, expected, SUM_ORDER)
        before = tmp_path / layout
    again = run(1, train, path, "tp=1", frozen, tmp_path / "again", before)[0]
    assert_all_close(again, expected, SUM_ORDER)
    if name == "llama":
        bad = run(1, train, path, "tp=1", frozen, tmp_path / "bad", wrong=True)[0]
        assert worst_error(bad, expected)[0] > SUM_ORDER


def halves_and_whole(path: Path) -> list[list[float]]:
    """The norm of a batch's gradient, and of its halves' sum, whose balance losses are the same where counts are."""
    engine = made(path, "tp=1", ())
    whole = dt.PackedBatch.pack(
        [row for batch in batches() for row in batch.tokens.split(batch.lengths)]
    )
    norms = []
    for given in ([whole], batches()):
        for batch in given:
            engine.forward_backward(batch, tokenwise)
        engine.optimizer.steps = 8  # whose rate is 0
        engine.param_groups[0].lr = engine.param_groups[1].lr = 0.0
        report = engine.optim_step()
        norms.append([report.loss, report.grad_norm])
    return norms


def test_halves_are_the_whole(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    whole, parts = run(1, halves_and_whole, tmp_path)[0]
    assert parts == pytest.approx(whole, rel=SUM_ORDER)
