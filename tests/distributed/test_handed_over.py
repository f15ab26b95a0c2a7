"""Mixtures that hand their weights' gradients over, in whole engines: sharded, exchanged, piped, recomputed, and in part."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dovetail.engine.native import Engine
from dovetail.factory import engine
from dovetail.kernels.registry import KernelSet
from dovetail.nn.products import Products
from dovetail.parallel.layout import Layout
from tests.helpers import matrix
from tests.helpers.harness import run
from tests.helpers.held import HandingOver
from tests.helpers.matrix import (
    FLAT,
    SHALLOW,
    Case,
    Figures,
    compare,
    path_of,
    write_alone,
    write_models,
)
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import EXACT, GRAD_RATIO_FP32, SUM_ORDER, worst_error


class Handing:
    """A kernel set's mixture; what has a number of rows that three divides, or none, goes to the reference."""

    def __init__(self) -> None:
        self.handed = self.plain = 0

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Any, copies: int | None, add: Any
    ) -> Tensor:
        def compute(x: Tensor, weights: Tensor, *experts: Tensor) -> Tensor:
            return Products(KernelSet()).mixture_of_experts(
                x, chosen, weights, (experts[0], experts[1]), copies
            )

        if copies == 0 or len(x) % 3 == 0:
            self.plain += torch.is_grad_enabled()
            return compute(x, weights, *experts)
        self.handed += torch.is_grad_enabled()
        y: Tensor = HandingOver.apply(x, weights, *experts, compute, (add, add_))
        return y


def add_(total: Tensor, dw: Tensor, _x: Tensor, *, first: bool) -> None:
    total.copy_(dw) if first else total.add_(dw)


def broken_add_(*_: object, **__: object) -> None:
    raise ArithmeticError("in a product")


CASES = (
    (Layout(dp=2), Case("qwen2_moe", "ragged", "grpo", 3, recompute="full", depth=FLAT)),
    (
        Layout(dp=2, ep=2),
        Case("qwen3_moe", "ragged", "ppo", 2, in_turns=True, recompute="selective", depth=FLAT),
    ),
    (Layout(dp=2, ep=2), Case("qwen3_moe", "giant", "sft", depth=FLAT)),
    (Layout(dp=2, ep=2), Case("qwen3_moe", "ones", "value", recompute="light", depth=FLAT)),
    (
        Layout(pp=2, schedule="zero_bubble"),
        Case("qwen3_moe", "ragged", "sft", 2, recompute="light", depth=SHALLOW),
    ),
    (
        Layout(pp=2, virtual_stages=2, schedule="interleaved", dp=2, ep=2),
        Case("qwen3_moe", "ragged", "gspo", 2, recompute="full", depth=SHALLOW),
    ),
    (Layout(tp=2, cp=2, ep=2), Case("deepseek_v3", "few", "sft", 2, in_turns=True, depth=SHALLOW)),
)


def whole_model(folder: Path, layout: Layout, case: Case) -> tuple[Figures, int, int]:
    """How far the layout is from one rank without any, and how many mixtures handed over, and did not."""
    handing, made = Handing(), list[Engine]()
    measure = matrix.measure

    def noted(one: Engine, *how: Any) -> Any:
        made.append(one)
        return measure(one, *how)

    kernels = mock.patch.object(engine, "kernels_for", return_value=KernelSet(mixture=handing))
    with kernels, mock.patch.object(matrix, "measure", noted):
        (figures,) = compare(str(folder), layout, (case,)).values()
    assert not made[0].model.wgrad_queue.deferred, "gradients that nobody added"
    return figures, handing.handed, handing.plain


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(*each, id=str(number), marks=[pytest.mark.soak] * (number in (2, 6)))
        for number, each in enumerate(CASES)
    ],
)
def test_whole_models_equal_one_rank(layout: Layout, case: Case, tmp_path: Path) -> None:
    write_models(tmp_path, [case.model], case.depth)
    run(1, write_alone, str(tmp_path), (case.alone,))
    found = run(layout.num_ranks, whole_model, tmp_path, layout, case)
    for figures, _, _ in found:
        assert (
            figures.worst <= SUM_ORDER
            and figures.ratio <= GRAD_RATIO_FP32
            and figures.stray == EXACT
        ), figures
    assert sum(handed for _, handed, _ in found) > 1


def after_an_error(path: Path) -> float:
    """How far the gradients of a step after one that raised, with another product put off, are from those of a first step."""
    found = []
    case = Case("qwen3_moe", "ragged", "sft")
    batch, options = matrix.make_batch(case, torch.float64), engine.EngineOptions(optim=PROBE)
    with mock.patch.object(engine, "kernels_for", return_value=KernelSet(mixture=Handing())):
        for breaks in (False, True):
            made = engine.from_pretrained(path, dtype=torch.float64, device="cpu", options=options)
            if breaks:
                with (
                    mock.patch.dict(globals(), add_=broken_add_),
                    pytest.raises(ArithmeticError, match="in a product"),
                ):
                    made.train_step(batch, matrix.LOSSES[case.loss])
            made.train_step(batch, matrix.LOSSES[case.loss])
            found.append(gradients(made)[0])
    return worst_error(found[1], found[0])[0]


def test_a_step_that_raised_leaves_no_product_to_the_next(tmp_path: Path) -> None:
    write_models(tmp_path, ["qwen3_moe"], FLAT)
    assert run(1, after_an_error, path_of(tmp_path, "qwen3_moe", FLAT)) == [EXACT]
