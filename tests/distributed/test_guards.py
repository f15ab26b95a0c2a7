"""Numbers that stop being finite, and copies that stop being equal: found in the same step, on every rank, by name."""

import contextlib
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.models import one_rank
from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.engine.nonfinite import StepWatch
from dovetail.errors import DataError, MachineError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.launch.progress import Progress
from dovetail.optim import optimizer
from dovetail.optim.optimizer import OptimSettings, Shard, reduce_partial
from dovetail.optim.replicas import _difference, hash_bits, slices_of
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.shards import local_tensor
from tests.helpers.harness import run
from tests.helpers.layout_bodies import tokenwise
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.parity_reference import LENGTHS, make_batch

FIELDS = ("advantage", "old_logprob")
KINDS = ("loss", "logits", "gradient", "parameter", "unused parameter", *FIELDS)
LAYOUTS = ("tp=2", "dp=2", "pp=2")
FEW = 12  # tokens
WIDE = ("tp=2,dp=2", "pp=2,tp=2", "cp=2,dp=2", "tp=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "llama_tied", "apertus"):
        save_tiny(tiny_configs()[name], folder / name)
    return folder


def engine_of(
    path: Path, layout: str, watch: StepWatch | None = None, budget: int | None = None
) -> Engine:
    options = EngineOptions(
        optim=OptimSettings(lr=1e-3), watch=watch or StepWatch(), tokens_per_batch=budget
    )
    return from_pretrained(path, layout=Layout.parse(layout), device="cpu", options=options)


def snapshot(engine: Engine) -> list[Tensor]:
    """Everything that a skipped step may not touch."""
    optimizer = engine.optimizer
    states = [optimizer.rule.state[shard.local] for shard in optimizer.shards]
    moments = [state[kind].clone() for state in states for kind in sorted(state)]
    return [
        torch.tensor(optimizer.steps),
        *(s.local.detach().clone() for s in optimizer.shards),
        *moments,
    ]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Bit for bit: what is not a number equals itself, too."""
    return len(before) == len(after) and all(
        map(torch.equal, map(hash_bits, before), map(hash_bits, after))
    )


def with_loss(bad: float) -> Callable[[TokenStats, PackedBatch], Loss]:
    def loss(stats: TokenStats, batch: PackedBatch) -> Loss:
        """A sum that is not finite though every gradient is."""
        return Loss(-stats.logprob.sum() + bad, batch.mask.sum())

    return loss


def with_logits(bad: float) -> Callable[[TokenStats, PackedBatch], Loss]:
    def loss(stats: TokenStats, batch: PackedBatch) -> Loss:
        return Loss((stats.logprob * bad).sum(), batch.mask.sum())

    return loss


def blind(stats: TokenStats, batch: PackedBatch) -> Loss:
    """A loss that looks finite whatever its inputs are: it never reads them."""
    return Loss(-stats.logprob.sum(), batch.mask.sum())


@contextlib.contextmanager
def planted(kind: str, bad: float, engine: Engine) -> Iterator[None]:
    """A parameter, or a gradient before it is summed over copies, with one number that is not finite."""
    shard = next(s for s in engine.optimizer.shards if s.local.dim() == 2 and s.local.numel())
    with contextlib.ExitStack() as undo:
        if kind in ("parameter", "unused parameter"):
            seen = make_batch().tokens
            row = (
                0
                if kind == "parameter"
                else next(i for i in range(shard.local.shape[0]) if i not in seen)
            )
            weights = shard.local.detach()
            undo.callback(weights.copy_, weights.clone())
            weights[row, 0] = bad
        if kind == "gradient":
            plain = reduce_partial

            def spoil(shards: list[Shard], mesh: Mesh) -> None:
                local_tensor(cast(Tensor, shard.source.grad))[0, 0] = bad
                plain(shards, mesh)

            undo.enter_context(mock.patch.object(optimizer, "reduce_partial", spoil))
        yield


def guarded(
    path: Path, layout: str, folder: Path
) -> list[tuple[str, bool, bool, dict[int, Any], int | None]]:
    """Every kind of trouble on the last rank, one step each: (kind, skipped, all bits as before, who told what, step)."""
    progress = Progress()
    engine = engine_of(path, layout, StepWatch(progress, folder))
    world = engine.mesh["world"]
    batch = make_batch()
    batch = batch.with_fields(**{name: torch.zeros(len(batch)) for name in FIELDS})
    engine.train_step(batch, blind)
    found: list[tuple[str, bool, bool, dict[int, Any], int | None]] = []
    for number, (kind, bad) in enumerate(product(KINDS, (math.nan, math.inf)), 1):
        progress.phase("update", number)
        hit = world.rank == world.size - 1
        given = batch
        loss: Callable[[TokenStats, PackedBatch], Loss] = blind
        if hit and kind in FIELDS:
            given = batch.with_fields(**{kind: torch.where(batch.mask, bad, 0.0)})
        if hit and kind in ("loss", "logits"):
            loss = {"loss": with_loss, "logits": with_logits}[kind](bad)
        with planted(kind if hit else "", bad, engine):
            before = snapshot(engine)
            report = engine.train_step(given, loss)
            found.append(
                (kind, report.skipped, same(before, snapshot(engine)), dict(report.faults), number)
            )
    passes: list[tuple[str, int, int]] = []
    progress.listener = lambda phase, done, total, _: passes.append((phase, done, total))
    report = engine.train_step(batch, blind)
    passes = [each for each in passes if each[1]]
    assert passes and passes == [("update", n, len(passes)) for n in range(1, len(passes) + 1)], (
        "each is announced"
    )
    found.append(("clean", report.skipped, True, dict(report.faults), None))
    return found


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.soak) for name in WIDE)]
)
def test_what_is_not_finite_on_one_rank_changes_no_bit_on_any(
    layout: str, folder: Path, tmp_path: Path
) -> None:
    ranks = Layout.parse(layout).num_ranks
    told = run(ranks, guarded, folder / "llama", layout, tmp_path / "faults")
    last = ranks - 1
    words = {
        "logits": "loss",
        "unused parameter": "parameter",
        **{name: f"{name} of micro-batch 0" for name in FIELDS},
    }
    for each in zip(*told, strict=True):
        kind, _, _, faults, number = each[0]
        assert all(rank == (*each[0][:2], True, *each[0][3:]) for rank in each), (
            f"{kind}: ranks differ, {each}"
        )
        if kind == "clean":
            assert (each[0][1], faults) == (False, {})
            continue
        assert each[0][1], f"{kind} was not noticed"
        assert any(fault.startswith(words.get(kind, kind)) for fault in faults[last]), (
            kind,
            faults,
        )
        place = tmp_path / "faults" / f"step_{number:06}.rank_{last}"
        kept = load_file(place / "micro_batches.safetensors")
        assert {"0.tokens", "0.mask", "0.advantage"} <= kept.keys()
        assert kind not in FIELDS or not kept[f"0.{kind}"].isfinite().all(), (
            "what was wrong is what is kept"
        )
        assert json.loads((place / "fault.json").read_text())["faults"] == {
            str(r): f for r, f in faults.items()
        }


def test_what_cannot_be_kept_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full on one rank: the others would wait for it in the next collective."""
    (tmp_path / "full").write_text("no folder")
    watch = StepWatch(Progress(), tmp_path / "full/faults")
    assert watch.record(["loss"], [], Mesh.solo()) == {0: ["loss"]}
    assert "what rank 0 computed on, is not kept" in capsys.readouterr().err


def torn(stats: TokenStats, batch: PackedBatch) -> Loss:
    """What a loss of pairs makes of a micro-batch with an odd number of sequences."""
    sequences = int((batch.cu_seqlens.diff() > 0).sum())
    return Loss(-stats.logprob.sum() / (0.0 if sequences % 2 else 1.0), batch.mask.sum())


def test_a_loss_that_is_not_finite_is_named_with_its_sequences(folder: Path) -> None:
    batch = PackedBatch.pack(
        [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    )  # the longest comes first, with the first that fits
    with one_rank():
        report = engine_of(folder / "llama", "tp=1", budget=8).train_step(batch, torn)
    assert report.describe_faults().startswith(
        "not finite: rank 0: loss of micro-batch 1 (sequences 2)"
    )
    assert not any(
        fault.startswith(("loss of micro-batch 0", "gradient")) for fault in report.faults[0]
    )


def test_what_a_loss_raises_says_what_it_was_given(folder: Path) -> None:
    def pairs(stats: TokenStats, batch: PackedBatch) -> Loss:
        chosen, _ = (stats.logprob.sum(), stats.logprob.sum())[: batch.num_sequences]
        return Loss(-chosen, batch.mask.sum())

    with one_rank(), pytest.raises(ValueError, match="not enough values") as caught:
        engine_of(folder / "llama", "tp=1").train_step(PackedBatch.pack([[1, 2, 3]]), pairs)
    assert (
        "raised by the loss of a micro-batch of 1 sequences with 2 counted tokens"
        in caught.value.__notes__[0]
    )


class Raising:
    """Raises at its second call, on every rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("in the loss")
        return tokenwise(stats, batch)


def astray(path: Path, layout: str) -> tuple[list[str], list[tuple[float, float]]]:
    """What this rank hears of batches that are not those of the others; its first step, and one after all that raised."""
    batch = make_batch().select(
        [i for i, n in enumerate(LENGTHS) if n <= FEW]
    )  # two micro-batches a replica
    first = engine_of(path, layout, budget=FEW).train_step(batch, tokenwise)
    engine = engine_of(path, layout, budget=FEW)
    rank, told = engine.mesh["world"].rank, []
    others = (
        batch.select([4, 5 if rank else 4]),
        batch.select([0, 5][rank:]),
        batch.with_mask(batch.mask & (rank == 0)),
    )
    for other in others:
        for call in (engine.score, partial(engine.train_step, loss=tokenwise)):
            with pytest.raises(DataError) as caught:
                call(other)
            told.append(str(caught.value))
    with pytest.raises(ArithmeticError):
        engine.train_step(batch, Raising())
    again = engine.train_step(batch, tokenwise)
    return told, [(report.loss, report.grad_norm) for report in (first, again)]


@pytest.mark.parametrize("layout", ["tp=2", "dp=2"])
def test_ranks_that_go_astray_are_told_and_leave_nothing_behind(layout: str, folder: Path) -> None:
    ranks = run(2, astray, folder / "llama", layout)
    assert ranks[0] == ranks[1]
    told, (first, again) = ranks[0]
    assert again == first
    named = ["lengths, tokens, targets, mask"] * 4 + ["mask"] * 2
    assert [message.partition(" in ")[2].partition(";")[0] for message in told] == named
    assert all("the same whole global batch" in message for message in told)


def flipped(path: Path, layout: str, flips: int) -> tuple[int, int, list[str]]:
    """Clean checks that pass, then one bit at a time in a copy that some rank holds: (flips, found, wrong messages)."""
    engine = engine_of(path, layout)
    batch, world = make_batch(), engine.mesh["world"]
    for _ in range(2):
        engine.check_replicas()
        engine.train_step(batch, tokenwise)
    engine.check_replicas()
    pieces = dict(slices_of(engine.model, engine.optimizer, engine.mesh))
    everyone = [set(theirs) for theirs in gather_objects(list(pieces), world)]
    draw, found, wrong = random.Random(layout), 0, []
    copied = sorted(
        {
            name
            for names in everyone
            for name in names
            if sum(name in other for other in everyone) > 1
        }
    )
    for _ in range(flips):
        name = draw.choice(copied)
        rank = draw.choice([r for r, names in enumerate(everyone) if name in names])
        at, bit = draw.random(), draw.randrange(32)
        if world.rank == rank:
            flip(pieces[name], at, bit)
        try:
            engine.check_replicas()
            wrong.append(f"{name} on rank {rank}: not found")
        except MachineError as error:
            found += name in str(error) and f"rank {rank}" in str(error)
        if world.rank == rank:
            flip(pieces[name], at, bit)
    engine.check_replicas()
    return len(copied), found, wrong


def flip(x: Tensor, at: float, bit: int) -> None:
    index = tuple(torch.unravel_index(torch.tensor(int(at * x.numel())), x.shape))
    x[index] = (x[index].view(torch.int32) ^ torch.tensor(1 << bit).to(torch.int32)).view(
        torch.float32
    )


@pytest.mark.parametrize(
    ("name", "layout", "flips"),
    [
        ("llama", "tp=4", 6),
        ("llama_tied", "pp=2", 6),
        *(
            pytest.param(name, layout, 25, marks=pytest.mark.soak)
            for name, layout in (
                ("llama", "tp=2,dp=2"),
                ("llama", "tp=4"),
                ("llama_tied", "pp=2,tp=2"),
                ("llama_tied", "pp=2,dp=2"),
                ("llama_tied", "tp=4"),
                ("apertus", "tp=2,cp=2"),
                ("apertus", "tp=4"),
                ("apertus", "dp=4"),
            )
        ),
    ],
)
def test_one_flipped_bit_in_a_copy_is_found_and_named(
    name: str, layout: str, flips: int, folder: Path
) -> None:
    """Of a norm, a copied KV head, a tied table at both ends, their moments, a buffer. Nothing is said of equal ones."""
    for copied, found, wrong in run(
        Layout.parse(layout).num_ranks, flipped, folder / name, layout, flips
    ):
        assert copied > 0
        assert (found, wrong) == (flips, [])


def test_copies_outvoted_by_others_are_named() -> None:
    assert _difference({0: 5, 1: 7, 2: 5}) == "rank 1 differs from rank 0, 2"
    assert (
        _difference({0: 5, 3: 7})
        == "rank 0 and rank 3 differ, and no majority tells which is right"
    )
