"""Halves of micro-batches in turns: equal to one rank in every layout, and with work under (nearly) every collective."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn import moe
from dovetail.nn.layers import WgradQueue
from dovetail.parallel.layout import Layout
from dovetail.parallel.overlap import AsyncCollective
from tests.helpers.harness import run
from tests.helpers.matrix import (
    LOSSES,
    RECIPES,
    SHALLOW,
    Case,
    name_of,
    path_of,
    random_batch,
    write_models,
)
from tests.helpers.matrix_checks import check
from tests.helpers.probe import PROBE

DENSE = (
    (Layout(tp=2), Case("llama", "ragged", "grpo", 1, in_turns=True)),
    (Layout(tp=2, dp=2), Case("qwen3", "ragged", "ppo", 3, in_turns=True, recompute="selective")),
    (
        Layout(tp=2, cp=2, cp_mode="gather"),
        Case("qwen2_tied", "ragged", "grpo", 1, in_turns=True, recompute="full"),
    ),
    (
        Layout(tp=2, pp=2, schedule="zero_bubble"),
        Case("llama", "ragged", "sft", 3, in_turns=True, recompute="light"),
    ),
    (Layout(tp=2, pp=2), Case("mistral", "ragged", "value", 3, in_turns=True)),
    (Layout(tp=2, cp=2), Case("qwen3_window", "few", "gspo", 1, in_turns=True)),
    (Layout(tp=4), Case("llama_dynamic", "few", "sft", 1, in_turns=True)),
    (Layout(dp=2), Case("qwen3", "ones", "grpo", 1, in_turns=True)),
)
MIXED = (
    (Layout(dp=2, ep=2), Case("qwen2_moe", "ragged", "sft", 3, in_turns=True, recompute="full")),
    (
        Layout(tp=2, dp=2, ep=2),
        Case("deepseek_v3", "few", "ppo", 1, in_turns=True, recompute="selective"),
    ),
    (
        Layout(tp=2, pp=2, schedule="zero_bubble"),
        Case("deepseek_v2", "ragged", "grpo", 3, in_turns=True),
    ),
    (Layout(dp=4, ep=2), Case("qwen3_moe", "ragged", "grpo", 1, in_turns=True)),
    (Layout(cp=2, ep=2), Case("mixtral", "ragged", "value", 1, in_turns=True)),
    (Layout(dp=4, ep=4), Case("qwen3_moe", "giant", "gspo", 1, in_turns=True)),
)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `check` writes models."""
    return tmp_path_factory.mktemp("dense_turns")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `check` writes models."""
    return tmp_path_factory.mktemp("mixed_turns")


def marked(cases: tuple[tuple[Layout, Case], ...], quick: int) -> list[Any]:
    """The first ones, and the others for `make soak`."""
    return [
        pytest.param(
            layout, case, id=f"{name_of(layout)}-{case}", marks=[pytest.mark.soak] * (i >= quick)
        )
        for i, (layout, case) in enumerate(cases)
    ]


@pytest.mark.parametrize(("layout", "case"), marked(DENSE, 4))
def test_dense_layers_in_turns_equal_one_rank(dense: Path, layout: Layout, case: Case) -> None:
    check(dense, layout, (case.on(layout),))


@pytest.mark.parametrize(("layout", "case"), marked(MIXED, 2))
def test_mixtures_in_turns_equal_one_rank(mixed: Path, layout: Layout, case: Case) -> None:
    check(mixed, layout, (case.on(layout),))


def covered(folder: Path, layout: Layout, *, in_turns: bool) -> dict[str, tuple[int, int]]:
    """There and back: how many crossings of one training step had a product between beginning and end, and how many had none."""
    events: list[tuple[str, int]] = []

    def noting(cls: type, method: str, what: str) -> Any:
        original = getattr(cls, method)

        def noted(self: Any, *given: Any, **named: Any) -> Any:
            events.append((what, id(self)))
            return original(self, *given, **named)

        return mock.patch.object(cls, method, noted)

    options = EngineOptions(optim=PROBE, dual_batch=in_turns)
    engine = from_pretrained(
        folder, layout=layout, dtype=torch.float64, device="cpu", options=options
    )
    batch = random_batch(RECIPES["ragged"], "sft", torch.float64)
    held: list[AsyncCollective] = []  # or one would get the number of one before
    init = AsyncCollective.__init__

    def kept(self: AsyncCollective, *given: Any) -> None:
        held.append(self)
        init(self, *given)

    def product_of(original: Any) -> Any:
        def product(*given: Any) -> Any:
            events.append(("product", 0))
            return original(*given)

        return product

    def mixing(notes: Tensor) -> tuple[Tensor, Tensor]:
        """Called right before the products of experts; in a backward pass their gradients come right before its own."""
        events.append(("product", 0))
        chosen, weights = read(notes)
        weights.register_hook(lambda _: events.append(("product", 0)))
        return chosen, weights

    read = moe.unpack_choices
    engine.train_step(batch, LOSSES["sft"])  # the first one makes the optimizer
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(AsyncCollective, "__init__", kept))
        patches.enter_context(mock.patch.object(F, "linear", product_of(F.linear)))
        patches.enter_context(noting(WgradQueue, "accumulate", "product"))
        patches.enter_context(mock.patch.object(moe, "unpack_choices", mixing))
        for method in ("start", "wait", "start_backward", "wait_backward"):
            patches.enter_context(noting(AsyncCollective, method, method))
        engine.train_step(batch, LOSSES["sft"])
    found = {}
    for begin, end in (("start", "wait"), ("start_backward", "wait_backward")):
        spans = [
            (i, events.index((end, number)))
            for i, (what, number) in enumerate(events)
            if what == begin
        ]
        under = sum(any(what == "product" for what, _ in events[i:j]) for i, j in spans)
        found[begin] = under, len(spans) - under
    return found


def test_products_lie_under_three_of_four_collectives(dense: Path) -> None:
    """Of eight in a layer two, at its ends, have none; alone only the input gradients of column products have one."""
    layers = SHALLOW
    write_models(dense, ["llama"], SHALLOW)
    alone, turns = (
        run(2, covered, path_of(dense, "llama", SHALLOW), Layout(tp=2), in_turns=in_turns)[0]
        for in_turns in (False, True)
    )
    assert alone == {"start": (0, 4 * layers), "start_backward": (2 * layers, 2 * layers)}
    assert turns == {"start": (6 * layers, 2 * layers), "start_backward": (7 * layers, layers)}


def test_products_lie_under_exchanges_of_experts(mixed: Path) -> None:
    """Rows and notes there, rows back. Forward, what goes there begins when the host knows how much: on a device that is still
    busy with the other half. Backward, of six in a layer one has nothing under it.
    """
    layers = SHALLOW
    write_models(mixed, ["qwen3_moe"], SHALLOW)
    turns, *_ = run(
        2, covered, path_of(mixed, "qwen3_moe", SHALLOW), Layout(dp=2, ep=2), in_turns=True
    )
    assert turns == {"start": (layers, 5 * layers), "start_backward": (5 * layers, layers)}
