"""Optimizers on layouts: as on one rank, and every layout goes on from any other's state."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.optim import matrices
from dovetail.optim.matrices import ROUND_ELEMENTS
from tests.helpers.harness import run
from tests.helpers.layout_bodies import Flat, tokenwise
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny_configs
from tests.helpers.probe import assemble, parameters
from tests.helpers.tolerances import EXACT, SUM_ORDER, assert_all_close, max_abs

LENGTHS = ((9, 5, 14, 3), (12, 4, 7, 6, 2), (8, 3, 11, 5))
GROUPS = (dt.ParamGroup("*.layers.1.*", lr=3e-3, weight_decay=0.2),)
RULES: dict[str, dict[str, Any]] = {
    "muon": {"adamw_lr": 2e-3},
    "sgd": {"momentum": 0.9},
    "nadam": {},
}
LAYOUTS = {
    "llama": ("tp=2,dp=2,pp=2", "tp=4,dp=2", "dp=3"),
    "qwen3_moe": ("tp=2,dp=2,ep=2", "pp=2,dp=2,ep=2", "dp=4,ep=2"),
}
FEW = ROUND_ELEMENTS >> 16  # several rounds for tiny matrices, too


def made(path: Path, layout: str, rule: str, dtype: torch.dtype = torch.float64) -> Any:
    optim = dt.OptimSettings(
        name=rule,
        options=RULES.get(rule, {}),
        lr=1e-2,
        weight_decay=0.1,
        groups=GROUPS,
        frozen=("model.layers.0.self_attn.o_proj.weight",),
        schedule="linear",
        total_steps=9,
        clip_norm=0.5,
    )
    options = dt.EngineOptions(optim=optim, tokens_per_batch=16)
    return dt.from_pretrained(
        path, layout=dt.Layout.parse(layout), dtype=dtype, device="cpu", options=options
    )


def batches() -> list[dt.PackedBatch]:
    draw = torch.Generator().manual_seed(2)
    return [
        dt.PackedBatch.pack([torch.randint(VOCAB, (n,), generator=draw) for n in part])
        for part in LENGTHS
    ]


def train(
    path: Path, layout: str, rule: str, after: Path, before: Path | None = None
) -> dict[str, Tensor]:
    """Three steps. after: where the state of the first two is saved. before: where it is loaded from, in place of them."""
    with mock.patch.object(matrices, "ROUND_ELEMENTS", FEW):
        engine = made(path, layout, rule)
        if before is not None:
            engine.load_state(before)
            engine.save_state(after)
        for step, batch in enumerate(batches()):
            if before is None or step == 2:
                assert not engine.train_step(batch, tokenwise).skipped
            if step == 1 and before is None:
                engine.save_state(after)
    engine.check_replicas()
    rule_of = engine.optimizer.rule
    assert rule != "muon" or len(rule_of.rounds) > 1
    weights, stray = parameters(engine)
    assert stray == 0.0, f"ranks that hold the same piece differ by {stray}"
    return weights


def chain(name: str, rule: str, layouts: Sequence[str], folder: Path) -> None:
    """One rank, again from its own state, then the first layout; each other one goes on from the state before it."""
    save_tiny((tiny_configs() | moe_configs())[name], folder / "model")
    (expected,) = run(1, train, folder / "model", "", rule, folder / "one")
    (again,) = run(1, train, folder / "model", "", rule, folder / "same", folder / "one")
    assert_all_close(again, expected, EXACT)
    before = None
    for layout in layouts:
        found, *_ = run(
            dt.Layout.parse(layout).num_ranks,
            train,
            folder / "model",
            layout,
            rule,
            folder / layout,
            before,
        )
        assert_all_close(found, expected, SUM_ORDER)
        before = folder / layout
    (last,) = run(1, train, folder / "model", "", rule, folder / "last", before)
    assert_all_close(last, expected, SUM_ORDER)


@pytest.mark.parametrize(
    ("name", "rule", "layouts"),
    [
        ("llama", "muon", ("tp=2,dp=2,pp=2",)),
        ("qwen3_moe", "muon", ("dp=2,ep=2", "tp=2")),
        ("llama", "nadam", ("dp=2", "pp=2")),
    ],
)
def test_layouts_are_one_rank(name: str, rule: str, layouts: Sequence[str], tmp_path: Path) -> None:
    chain(name, rule, layouts, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_more_layouts_are_one_rank(name: str, rule: str, tmp_path: Path) -> None:
    chain(name, rule, LAYOUTS[name], tmp_path)


def moment(rule: Any, kind: str, shard: Any) -> Tensor:
    state: Tensor = rule.stored(shard.local)[kind]
    return state


def eight_bits(
    path: Path, layout: str, after: Path, before: Path | None = None
) -> tuple[list[Tensor], list[Flat]]:
    """Of adamw8bit the bits of the state after two steps, its values, and the weights after a third."""
    engine = made(path, layout, "adamw8bit", torch.float32)
    if before is None:
        for batch in batches()[:2]:
            engine.train_step(batch, tokenwise)
        engine.save_state(after)
    else:
        engine.load_state(before)
    engine.check_replicas()
    rule = engine.optimizer.rule
    bits = [x.clone() for x in rule.resident()]
    assert any(x.dtype == torch.uint8 for x in bits)
    values = [assemble(engine, partial(moment, rule, kind))[0] for kind in rule.state_names]
    engine.offload()
    engine.onload()
    engine.train_step(batches()[2], tokenwise)
    return bits, [*values, parameters(engine)[0]]


def test_moments_of_eight_bits(tmp_path: Path) -> None:
    """The same bits on the same shards, and elsewhere what one more rounding leaves."""
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    save_tiny(tiny_configs()["llama"], tmp_path / "model")
    saved = tmp_path / "dp"
    first = run(2, eight_bits, tmp_path / "model", "dp=2", saved)
    again = run(2, eight_bits, tmp_path / "model", "dp=2", tmp_path / "same", saved)
    for (bits, found), (bits_again, found_again) in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits, bits_again, strict=True))
        assert all(
            torch.equal(x[n], y[n]) for x, y in zip(found, found_again, strict=True) for n in x
        )
    ((_, elsewhere),) = run(1, eight_bits, tmp_path / "model", "", tmp_path / "one", saved)
    for signed, before, after in zip((True, False), first[0][1], elsewhere, strict=False):
        step = max(
            b - a
            for a, b in pairwise(
                torchao.get_qmap_signed() if signed else torchao.get_qmap_unsigned()
            )
        )
        changed = [n for n in before if not torch.equal(before[n], after[n])]
        assert changed, "another layout has other blocks"
        assert all(max_abs(before[n] - after[n]) <= step * max_abs(before[n]) for n in changed)
