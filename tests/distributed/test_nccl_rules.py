"""All that engines send keeps NCCL's rules: scoring, a training step, the check of copies and the stream of weights."""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.engines import layout_of, ragged_batch, random_engine, spec_of
from dovetail.parallel import collectives
from dovetail.parallel.axes import Axis
from dovetail.rl.algorithms.sft import SFTLoss
from tests.helpers.harness import run
from tests.helpers.nccl_rules import RuleBroken, kept

LAYOUTS = (
    ("tiny", "tp=2,cp=2"),
    ("tiny", "pp=2,dp=2,virtual_stages=2,schedule=interleaved"),
    ("tiny-moe", "ep=2,tp=2,dp=2"),
)
MORE = (("tiny", "pp=2,tp=2,schedule=zero_bubble"),)


def everything(shape: str, text: str) -> dict[str, int]:
    """How often each function was called."""
    layout = layout_of(text)
    spec = spec_of(shape, num_hidden_layers=2 * layout.virtual_stages)
    engine = random_engine(spec, layout, torch.device("cpu"), tokens_per_batch=48)
    batch = ragged_batch(spec, 48, 96)
    with kept() as rules:
        engine.score(batch)
        assert not engine.train_step(batch, SFTLoss()).skipped
        assert sum(1 for _ in engine.weights())
        engine.check_replicas()
    return rules.seen


def all_of_it(layouts: tuple[tuple[str, str], ...]) -> list[dict[str, int]]:
    return [everything(*each) for each in layouts]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.soak)], ids=len)
def test_engines_keep_the_rules(layouts: tuple[tuple[str, str], ...]) -> None:
    (seen, *_) = run(4, all_of_it, layouts)
    for (_, text), calls in zip(layouts, seen, strict=True):
        assert calls["all_gather_single"] and calls["all_reduce"], text
        assert ("isend" in calls) == ("pp" in text)
        assert ("all_to_all_single" in calls) == ("ep" in text or "cp" in text)


def turned(x: Tensor, axis: Axis) -> None:
    dist.all_reduce(x.T, group=axis.group)


def unknown(x: Tensor, axis: Axis) -> None:
    collectives.stack_over(x.to(torch.int16), axis)


def unequal(x: Tensor, axis: Axis) -> None:
    collectives.stack_over(x[axis.rank :], axis)


def elsewhere(x: Tensor, axis: Axis) -> None:
    (collectives.sum_over if axis.rank else collectives.stack_over)(x, axis)


def miscounted(x: Tensor, axis: Axis) -> None:
    collectives.begin_all_to_all(x, [1, 1], [2 * axis.rank, 1], axis).wait()


def empty(x: Tensor, axis: Axis) -> None:
    dist.isend(x[:0], 1 - axis.rank, group=axis.group)


def forgotten(x: Tensor, axis: Axis) -> None:
    collectives.begin_scatter(x, axis)


def overwritten(x: Tensor, axis: Axis) -> None:
    begun = collectives.begin_scatter(x, axis)
    x.zero_()
    begun.wait()


BROKEN: Mapping[str, Callable[[Tensor, Axis], None]] = {
    "not contiguous": turned,
    "does not know": unknown,
    "ranks differ: .*\\[1, 1, 2\\]": unequal,
    "ranks differ: .*all_reduce": elsewhere,
    "rows to each other": miscounted,
    "empty message": empty,
    "never waited": forgotten,
    "written to": overwritten,
}


def broken() -> None:
    axis = Axis("both", 2, dist.get_rank(), dist.group.WORLD)
    for message, fn in BROKEN.items():
        with pytest.raises(RuleBroken, match=message), kept():
            fn(torch.ones(2, 2), axis)
    with kept():
        assert (
            collectives.sum_over(torch.ones(2, 2).T, axis).sum() == 8
        )  # made contiguous on the way


def test_every_rule_is_noticed() -> None:
    run(2, broken)
