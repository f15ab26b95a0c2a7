"""What a step does before its first block: gathers begin, then the batch is looked at, then one micro-batch is made.

The next ones are made behind the passes of those before. All of it is as good as one after the other, bit for bit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.engine import native
from dovetail.engine.native import Engine
from dovetail.engine.validation import check_same
from dovetail.errors import DataError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.layout_bodies import tokenwise
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny_configs

LENGTHS = (9, 5, 12, 7, 3, 11, 8, 4)
BUDGET = 16  # tokens of a micro-batch: several a replica
LAYOUTS = ("dp=2", "tp=2", "cp=2", "pp=2", "dp=1")
QUICK = ("tp=2", "cp=2")
FAMILIES = ("llama", "llama_tied", "qwen3_moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        save_tiny((tiny_configs() | moe_configs())[name], folder / name)
    return folder


def engine_of(path: Path, layout: str) -> Engine:
    options = EngineOptions(optim=OptimSettings(lr=1e-2), tokens_per_batch=BUDGET)
    engine = from_pretrained(path, layout=Layout.parse(layout), device="cpu", options=options)
    assert isinstance(engine, Engine)
    return engine


def batch_of(seed: int = 0) -> PackedBatch:
    draw = torch.Generator().manual_seed(seed)
    return PackedBatch.pack([torch.randint(VOCAB, (n,), generator=draw) for n in LENGTHS])


def under_way(engine: Engine) -> list[str]:
    """The modules whose parameters are being gathered, and not here yet."""
    groups = {
        name: module._get_fsdp_state()._fsdp_param_group
        for name, module in engine.model.named_modules()
        if isinstance(module, FSDPModule)
    }
    return sorted(
        name
        for name, group in groups.items()
        if group is not None and group._all_gather_result is not None
    )


@contextmanager
def noted(engine: Engine) -> Iterator[list[str]]:
    """What happens within, in order: "gathers" where all are under way before the batch is looked at, "made", "pass"."""
    events: list[str] = []
    look, make = check_same, MicroBatch.of

    def looked(*args: Any) -> None:
        events.append(f"gathers {under_way(engine)}")
        look(*args)

    def made(*args: Any) -> MicroBatch:
        events.append("made")
        return make(*args)

    def passed(_model: object, inputs: tuple[Any, ...]) -> None:
        if inputs[0] is not None:  # the one at the end of a step computes nothing
            events.append("pass")

    handle = engine.model.register_forward_pre_hook(passed)
    with ExitStack() as patches:
        patches.callback(handle.remove)
        patches.enter_context(mock.patch.object(native, "check_same", looked))
        patches.enter_context(mock.patch.object(MicroBatch, "of", made))
        yield events


def events_of(path: Path, layout: str) -> list[list[str]]:
    engine = engine_of(path, layout)
    batch, found = batch_of(), []
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.score(batch),
        lambda: engine.train_step(batch, tokenwise),
        lambda: engine.train_step(batch, tokenwise),
    )
    for call in calls:
        with noted(engine) as events:
            call()
        found.append(events)
        assert not under_way(engine)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gathers_come_first_and_micro_batches_one_by_one(family: str, folder: Path) -> None:
    ends = [] if family == "llama_tied" else ["model.embed_tokens"]
    first = f"gathers {sorted(['', *ends, 'model.layers.0'])}"
    for each in run(2, events_of, folder / family, "dp=2"):
        for seen in each:
            assert len(seen) >= 5, "several micro-batches"
            assert seen == [first, *["made", "pass"] * (len(seen) // 2)], seen


def bits_of(path: Path, layout: str, *, plainly: bool) -> list[Tensor]:
    """What two steps and scores give and leave. plainly: nothing is gathered early, and all micro-batches come at once."""
    engine, batch, found = engine_of(path, layout), batch_of(), list[Tensor]()
    with ExitStack() as patches:
        if plainly:
            plain = Engine.micro_batches
            patches.enter_context(mock.patch.object(native, "begin_gathers"))
            patches.enter_context(
                mock.patch.object(Engine, "micro_batches", lambda *args: list(plain(*args)))
            )
        for _ in range(2):
            report = engine.train_step(batch, tokenwise)
            found += [
                torch.tensor(
                    [report.loss, report.grad_norm, *report.metrics.values()], dtype=torch.float64
                )
            ]
            found += list(engine.score(batch))
    return [*found, *(shard.local.detach().clone() for shard in engine.optimizer.shards)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", "dp=2"),
        *(
            pytest.param("llama", each, marks=[pytest.mark.soak] * (each not in QUICK))
            for each in LAYOUTS
        ),
    ],
)
def test_every_bit_is_that_of_one_after_the_other(family: str, layout: str, folder: Path) -> None:
    ranks = Layout.parse(layout).num_ranks
    early, plain = (
        run(ranks, bits_of, folder / family, layout, plainly=plainly) for plainly in (False, True)
    )
    for mine, other in zip(early, plain, strict=True):
        assert len(mine) == len(other)
        assert all(map(torch.equal, mine, other))


def after_errors(path: Path, layout: str) -> list[tuple[Tensor, Tensor]]:
    """Log-probs after calls that were refused when their gathers were under way, and what they should be.

    The weights change in between, so what those gathers brought is worth nothing.
    """
    engine, other, found = engine_of(path, layout), engine_of(path, layout), []
    rank = engine.mesh["world"].rank
    for _ in range(2):  # before FSDP2's first forward pass, and after
        for call in (engine.score, lambda batch: engine.train_step(batch, tokenwise)):
            with pytest.raises(DataError, match="ranks were given different batches"):
                call(batch_of(rank))
            with pytest.raises(DataError, match=f"this llama model has ids 0 to {VOCAB - 1}"):
                call(PackedBatch.pack([[1, VOCAB], [2, 3]]))
            assert not under_way(engine)
            for each in (engine, other):
                with torch.no_grad():
                    for shard in each.optimizer.shards:
                        shard.local.mul_(1.25)
            found.append((engine.score(batch_of()).logprob, other.score(batch_of()).logprob))
    assert not under_way(engine)
    return found


def test_refused_calls_leave_no_gathers(folder: Path) -> None:
    for each in run(2, after_errors, folder / "llama", "dp=2"):
        assert all(torch.equal(mine, expected) for mine, expected in each)
        assert not torch.equal(each[0][0], each[1][0]), "the weights did change"
