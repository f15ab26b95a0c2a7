"""A training step with other optimizers than AdamW: torchrun --nproc-per-node 2 -m bench.optimizers [dp=2]

One engine with random weights, and an optimizer of each name over its parameters; steps on one batch take turns, so that
all see the same machine. Ratios are medians over the rounds, to the first name. `update`: the optimizer's part alone.
The 7B shape with 14 layers needs a GPU of 141 GB alone, or two of 80 GB.
"""

import argparse
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

import dovetail as dt
from bench.engines import (
    SHAPES,
    Session,
    add_options,
    dense_batch,
    layout_of,
    random_engine,
    spec_of,
    timed,
)
from bench.given import positive, run_main
from dovetail.device import peak_memory_gib
from dovetail.engine.native import Engine
from dovetail.optim.optimizer import Optimizer
from dovetail.rl.algorithms.sft import SFTLoss

LR = 1e-6


@dataclass(frozen=True)
class Row:
    """Seconds, medians over the rounds. state_gib: of this rank's optimizer state."""

    optimizer: str
    step_seconds: float
    step_ratio: float
    update_seconds: float
    state_gib: float
    peak_gib: float
    all_seconds: list[float]


def measured(
    engine: Engine, optimizers: dict[str, Optimizer], batch: dt.PackedBatch, session: Session
) -> list[Row]:
    steps: dict[str, list[float]] = {name: [] for name in optimizers}
    updates: dict[str, list[float]] = {name: [] for name in optimizers}
    few = batch.select([0])
    for number in range(session.given.steps + 1):
        names = [*optimizers] if number % 2 else [*reversed(optimizers)]
        for name in names:
            engine._optimizer = optimizers[name]
            seconds = timed(session.device, lambda: engine.train_step(batch, SFTLoss()))
            engine.forward_backward(few, SFTLoss())
            update = timed(session.device, engine.optim_step)
            if number:  # the first is a warm-up
                steps[name].append(seconds)
                updates[name].append(update)
    first = steps[next(iter(steps))]
    return [
        Row(
            optimizer=name,
            step_seconds=median(seconds),
            step_ratio=median(own / other for own, other in zip(seconds, first, strict=True)),
            update_seconds=median(updates[name]),
            state_gib=sum(x.nbytes for x in optimizers[name].rule.resident()) / 2**30,
            peak_gib=peak_memory_gib(session.device),
            all_seconds=seconds,
        )
        for name, seconds in steps.items()
    ]


def main() -> int:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimizers", description=__doc__)
    parser.add_argument(
        "layout", nargs="?", default="dp=auto", metavar="LAYOUT", help="default: dp over all ranks"
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=["adamw", "muon"], help="names of OptimSettings"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--depth", type=positive, default=14, help="layers")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=positive, default=32, help="of the global batch")
    parser.add_argument(
        "--tokens-per-batch",
        type=positive,
        help="of a replica's micro-batch; default: one sequence",
    )
    parser.add_argument(
        "--recompute", choices=["none", "light", "selective", "full"], default="light"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=5,
        help="of each optimizer, after one that is not measured",
    )
    add_options(parser, "optimizers")
    given = parser.parse_args()
    session = Session.start(given)
    session.begin("optimizers")
    layout = dt.Layout(dp=None) if given.layout == "dp=auto" else layout_of(given.layout)
    spec = spec_of(given.shape, num_hidden_layers=given.depth)
    budget = given.tokens_per_batch or given.length
    engine = random_engine(
        spec, layout, session.device, tokens_per_batch=budget, recompute=given.recompute
    )
    batch = dense_batch(spec, given.length, given.sequences)
    session.say(
        f"{given.shape}, {given.depth} layers, {len(batch):,} tokens a step, {engine.mesh.layout}\n"
    )
    optimizers = {"adamw": engine.optimizer}
    for name in given.optimizers:
        if name != "adamw":
            optimizers[name] = Optimizer(
                engine.model, engine.mesh, dt.OptimSettings(name=name, lr=LR)
            )
    chosen = {name: optimizers[name] for name in given.optimizers}
    session.say(
        f"{'optimizer':12}{'step s':>9}{'ratio':>8}{'update s':>10}{'state GiB':>11}{'peak GiB':>10}"
    )
    for row in measured(engine, chosen, batch, session):
        session.keep(row)
        session.say(
            f"{row.optimizer:12}{row.step_seconds:9.3f}{row.step_ratio:8.3f}{row.update_seconds:10.3f}{row.state_gib:11.1f}"
            f"{row.peak_gib:10.1f}"
        )
    if dist.get_rank() == 0:
        print(given.out / f"{given.name}.json")
    session.finish()
    return 0


if __name__ == "__main__":
    run_main(main)
