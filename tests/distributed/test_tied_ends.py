"""A tied table lies at both ends of a pipeline: equal to the last bit after loading, every step, saving and resuming."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.weights.shards import local_params
from tests.helpers.harness import run
from tests.helpers.layout_bodies import ragged, tokenwise
from tests.helpers.matrix import models, name_of
from tests.helpers.parity_configs import save_tiny

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STEPS = 3
LAYOUTS = (
    pytest.param(Layout(pp=2), marks=pytest.mark.soak),
    pytest.param(Layout(pp=4, schedule="zero_bubble"), marks=pytest.mark.soak),
    pytest.param(Layout(tp=2, pp=2, cp=2), marks=pytest.mark.soak),
    Layout(pp=2, dp=2, virtual_stages=2, schedule="interleaved"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "model"
    save_tiny(models(depth=5)["qwen2_tied"], folder)
    return folder


def opened(path: Path, layout: Layout, dtype: torch.dtype) -> Engine:
    options = EngineOptions(optim=OptimSettings(lr=1e-2), tokens_per_batch=64)
    return from_pretrained(path, layout=layout, dtype=dtype, device="cpu", options=options)


def table(engine: Engine, wrong: bool = False) -> Tensor:
    """This rank's rows of the table, which are those of its peer at the other end. Collective."""
    ends, pp = engine.mesh["ends"], engine.mesh["pp"]
    rows = [param.local for param in local_params(engine.model, engine.mesh) if param.name == TABLE]
    assert len(rows) == (pp.rank in (0, pp.size - 1)), "the ends hold the table, and nobody else"
    mine = rows[0].clone() if rows else torch.empty(0)
    if wrong and ends.rank:
        mine[0, 0] = mine[0, 0].nextafter(mine[0, 1] + 1)
    if rows:
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine, group=ends.group)
        assert torch.equal(*both), "the two ends differ"
    return mine


def live(source: Path, out: Path, layout: Layout, dtype: torch.dtype) -> None:
    """Load, train, save in both ways, load again and train on, looking at the ends every time."""
    engine = opened(source, layout, dtype)
    before = table(engine)
    for step in range(STEPS):
        engine.train_step(ragged(step), tokenwise)
        after = table(engine)
        assert not len(after) or not torch.equal(after, before), "nothing was learned"
        before = after
        engine.score(ragged(7))  # leaves parameters gathered, or has left them so
        assert torch.equal(table(engine), before)
    engine.save_pretrained(out / "hf")
    engine.save_sharded(out / "cut")
    for path in (out / "hf", out / "cut"):
        again = opened(path, layout, dtype)
        assert torch.equal(table(again), before)
        again.train_step(ragged(9), tokenwise)
        assert not len(before) or not torch.equal(table(again), before)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.soak)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_both_ends_hold_the_same_table(
    source: Path, tmp_path: Path, layout: Layout, dtype: torch.dtype
) -> None:
    run(layout.num_ranks, live, source, tmp_path, layout, dtype)


def one_off(source: Path) -> bool:
    engine = opened(source, Layout(pp=2), torch.float32)
    try:
        table(engine, wrong=True)
    except AssertionError:
        return True
    return False


def test_the_last_bit_of_one_number_would_be_noticed(source: Path) -> None:
    """The mutation."""
    assert run(2, one_off, source) == [True, True]
