"""What one rank does in a parity test: outputs and gradients of an engine against a reference, and against mutants."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dovetail.batch.loss import LossFn
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import Shard
from dovetail.parallel.layout import Layout
from tests.helpers.parity_reference import (
    LENGTHS,
    Separable,
    make_batch,
    objective,
    read_reference,
    value_objective,
)
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import max_abs, worst_error, worst_ratio

BUDGET = max(LENGTHS) + 10  # several micro-batches, and padding to a multiple of 8 fits
OBJECTIVES: tuple[LossFn, ...] = (objective, Separable())
FEW = (2, 4)  # fewer sequences than ranks: one of a single token, one of three


@dataclass
class Figures:
    """How far one model on one layout is from its reference. Outputs: |a - b| / max(1, |b|)."""

    output: float
    loss: float
    norm: float  # relative
    grad: float
    ratio: float
    stray: float  # between ranks that hold the same piece
    streamed: float  # weights() against the file, by name; infinite where names differ
    mutants: dict[str, float]  # the same measure with a planted defect


def compare(
    folders: dict[str, Path], layout: Layout, unharmed: Container[str] = ()
) -> dict[str, Figures]:
    """Every model of `folders` on one layout, against what `write_reference` wrote. No defect is planted in `unharmed`, and on
    several ranks the objective of these is of whole sequences or of tokens, in turn.
    """
    found = {}
    for number, (name, folder) in enumerate(folders.items()):
        harm = name not in unharmed
        losses = OBJECTIVES if harm or layout.num_ranks == 1 else (OBJECTIVES[number % 2],)
        found[name] = _compare_one(folder, layout, losses, harm=harm)
    return found


def _compare_one(
    folder: Path, layout: Layout, losses: tuple[LossFn, ...], *, harm: bool
) -> Figures:
    outputs, grads = read_reference(folder)
    values = "values" in outputs
    options = EngineOptions(optim=PROBE, tokens_per_batch=BUDGET)
    engine = from_pretrained(
        folder / "model",
        layout=layout,
        head="value" if values else "lm",
        device="cpu",
        options=options,
    )
    batch = make_batch()
    loss: Any = value_objective if values else objective
    figures = Figures(
        _output_error(engine, outputs), 0.0, 0.0, 0.0, 0.0, 0.0, _stream_error(engine, folder), {}
    )
    norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
    for each in (loss,) if values else losses:
        report = engine.train_step(batch, each)
        found, stray = gradients(engine)
        figures.loss = max(
            figures.loss, abs(report.loss - outputs["loss"].item()) / max(1.0, abs(report.loss))
        )
        figures.norm = max(figures.norm, abs(report.grad_norm / norm - 1.0))
        figures.grad = max(figures.grad, worst_error(found, grads)[0])
        figures.ratio = max(figures.ratio, worst_ratio(found, grads)[0])
        figures.stray = max(figures.stray, stray)
    if not harm:
        return figures
    right = engine.optimizer.shards
    for what, wrong in _defects(engine):
        engine.optimizer.shards = wrong
        engine.train_step(batch, loss)
        found, stray = gradients(engine)
        figures.mutants[what] = max(worst_error(found, grads)[0], stray)
    engine.optimizer.shards = right
    for shard in right:
        if shard.name.endswith(("layers.1.mlp.down_proj.weight", "layers.1.mlp.experts.down_proj")):
            with torch.no_grad():
                shard.local.mul_(1.01)
    figures.mutants["a weight is 1 % off"] = _output_error(engine, outputs)
    return figures


def _output_error(engine: Engine, outputs: dict[str, Tensor]) -> float:
    """The worst output of the whole batch, and of one with fewer sequences than ranks."""
    batch = make_batch()
    few = batch.select(FEW)
    worst = 0.0
    for asked, at in ((batch, slice(None)), (few, batch.token_index(FEW))):
        found = (
            {"values": engine.values(asked)}
            if "values" in outputs
            else engine.score(asked)._asdict()
        )
        for name, tensor in found.items():
            expected = outputs[name][at]
            worst = max(worst, max_abs((tensor - expected) / expected.abs().clamp(min=1.0)))
    return worst


def _stream_error(engine: Engine, folder: Path) -> float:
    """How far the engine's streamed weights are from the file that they came from."""
    expected, streamed = load_file(folder / "model" / "model.safetensors"), dict(engine.weights())
    return worst_error(streamed, expected)[0] if set(streamed) == set(expected) else float("inf")


def _defects(engine: Engine) -> Iterator[tuple[str, list[Shard]]]:
    """Placements with one thing left out: what is to be summed over tp or both ends of pp, and copies of heads."""
    shards = engine.optimizer.shards
    if engine.mesh["tp"].size > 1 or (engine.model.tied and engine.mesh["pp"].size > 1):
        whole = [replace(s, placement=replace(s.placement, partial_over=())) for s in shards]
        yield "partial gradients are not summed", whole
    if any(part.copies > 1 for s in shards for split in s.placement.splits for part in split.parts):
        alone = [replace(s, regions=tuple(replace(r, copies=1) for r in s.regions)) for s in shards]
        yield "gradients of copies are not summed", alone
