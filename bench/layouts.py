"""Training speed of one shape under several layouts, in one job: torchrun --nproc-per-node 8 -m bench.layouts dp=8 tp=2,dp=4

A layout is written as degrees, and further keys where it needs them: pp=4,dp=2,virtual_stages=2,schedule=interleaved.
Weights and tokens are random. Each layout trains the same global batch; a row is the median of its steps, beside what
peers did on the 7B shape, scaled by the rate of one product measured in this run. Further: the rate on RL's ragged
lengths (--ragged), a pipeline's bubble, measured and simulated (--bubbles), a trace of one step and its largest losses
(--profile). MFU counts what `engines.flops_of` says: of experts the active ones, and nothing that is computed again.
"""

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dovetail as dt
from bench.engines import (
    DTYPES,
    GOALS,
    MOE_BAR,
    OFFLOAD,
    PEERS,
    SHAPES,
    Session,
    add_options,
    attention_flops_of,
    dense_batch,
    flops_of,
    layout_of,
    name_of,
    ragged_batch,
    random_engine,
    spec_of,
    timed,
)
from bench.given import natural, positive, run_main
from bench.trace import TraceSummary, events_of, ideal_of, summarize
from dovetail.arch.spec import ArchSpec
from dovetail.batch.micro import DualBatch
from dovetail.device import peak_flops, peak_memory_gib
from dovetail.engine.native import Engine
from dovetail.engine.stage import TrainingRunner
from dovetail.parallel.collectives import gather_objects, stack_over
from dovetail.parallel.process_group import deterministic
from dovetail.pipeline.executor import run as execute
from dovetail.pipeline.schedule import Action, Costs, make_plan, simulate
from dovetail.rl.algorithms.sft import SFTLoss

TURNS = {"auto": None, "on": True, "off": False}
ATTENTION_RATE = (
    600e12  # FLOP/s, forward and backward, of the best packed kernel measured on an H200
)


@dataclass(frozen=True)
class Row:
    """One layout's figures on one batch."""

    title: str
    figure: str
    shape: str
    layout: str
    batch: str
    recompute: str
    micro_batches: int
    first_seconds: float
    seconds: float
    all_seconds: list[float]
    seconds_in_a_row: float | None  # of each of as many steps, with no pause between them
    deterministic_seconds: (
        float | None
    )  # the median of steps of trainer.deterministic, between the others; None: not asked for
    tokens_per_second_per_rank: float
    mfu: float | None
    peak_memory_gib: float
    peers: dict[str, float]  # tokens/s a GPU, recorded there and scaled by this run's product
    goal: float | None
    make_seconds: float = 0.0  # of groups, weights and all else before the first step
    outside_gib: float = 0.0  # of a device that torch's allocator knows nothing of: contexts, and communicators above all
    ratio_to_dense: float | None = None
    bubble: float | None = None
    predicted_bubble: float | None = None
    trace: dict[str, Any] | None = None  # of the rank that waited least
    waiting: list[float] | None = None  # seconds of that step in which each rank's GPU waited


def main() -> int:
    """Print one table and write one JSON, and the traces."""
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description=__doc__)
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--depth", type=positive, help="layers, where not all are wanted")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=positive, default=32, help="of the global batch")
    parser.add_argument(
        "--tokens-per-batch",
        type=positive,
        help="of a replica's micro-batch; default: one sequence",
    )
    parser.add_argument(
        "--recompute", choices=["none", "light", "selective", "full"], default="none"
    )
    parser.add_argument(
        "--offload", nargs="+", choices=OFFLOAD, default=[], help="what waits on the host"
    )
    parser.add_argument("--mlp-tile-tokens", type=natural, default=0)
    parser.add_argument("--window", type=positive, help="latest tokens that attention sees")
    parser.add_argument("--warm-length", type=positive, help="of the step that is not measured")
    parser.add_argument(
        "--in-turns",
        choices=list(TURNS),
        default="auto",
        help="halves of micro-batches, see nn.turns",
    )
    parser.add_argument("--steps", type=positive, default=3, help="measured, after one that is not")
    parser.add_argument(
        "--ragged", action="store_true", help="also as many tokens in lengths as RL has them"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="each step also as trainer.deterministic has it",
    )
    parser.add_argument(
        "--bubbles", action="store_true", help="also the waiting of a pipeline's ranks"
    )
    parser.add_argument("--profile", action="store_true", help="also a trace of one step")
    add_options(parser, "layouts")
    given = parser.parse_args()
    session = Session.start(given)
    if session.gemm:
        session.say(
            f"bf16 product of 8192 x 3584 x 152064: {session.gemm / 1e12:.0f} TFLOP/s, 722 where peers ran; "
            f"a launch: {1e6 * (session.launch or 0):.1f} us"
        )
    for text in given.layouts:
        measure(layout_of(text), session)
    session.say("\n".join(["", *(f"{row['title']}: {row['figure']}" for row in session.rows)]))
    session.finish()
    return 0


def measure(layout: dt.Layout, session: Session) -> None:
    """Train a few steps under one layout; everything it held is free afterwards."""
    session.begin(f"{session.given.shape} {layout}")
    given, device = session.given, session.device
    changes: dict[str, Any] = {"num_hidden_layers": given.depth} if given.depth else {}
    if given.window:
        changes |= {
            "use_sliding_window": True,
            "sliding_window": given.window,
            "max_window_layers": 0,
        }
    spec, begun = spec_of(given.shape, **changes), time.perf_counter()
    engine = random_engine(
        spec,
        layout,
        device,
        dtype=DTYPES[given.dtype],
        tokens_per_batch=given.tokens_per_batch or given.length,
        recompute=given.recompute,
        mlp_tile_tokens=given.mlp_tile_tokens,
        offload=given.offload,
    )
    engine.dual_batch = DualBatch.of(
        engine.model.supports_dual_batch, engine.mesh, TURNS[given.in_turns]
    )
    made = time.perf_counter() - begun
    batch = dense_batch(spec, given.length, given.sequences)
    warm = dense_batch(spec, given.warm_length or given.length, given.sequences)
    session.limit.at("its steps")
    row = _steps(engine, f"{given.sequences} x {given.length}", warm, batch, session)
    row["make_seconds"] = made
    if given.bubbles and layout.pp > 1:
        session.limit.at("its bubbles")
        row["bubble"], row["predicted_bubble"] = bubbles(engine, batch, given.steps)
    _keep(session, row)
    if given.profile:
        session.limit.at("the trace of a step")
        summaries = traced(engine, spec, batch, session, row)
        summary = min(summaries, key=lambda each: each.waiting)
        session.say(summary.table())
        session.rows.pop()
        row["trace"], row["waiting"] = summary.as_dict(), [each.waiting for each in summaries]
        _keep(session, row)
    if given.ragged:
        session.limit.at("its ragged steps")
        ragged_tokens = ragged_batch(spec, given.length, given.length * given.sequences)
        ragged = _steps(engine, "ragged", ragged_tokens, ragged_tokens, session)
        ragged["ratio_to_dense"] = (
            ragged["tokens_per_second_per_rank"] / row["tokens_per_second_per_rank"]
        )
        _keep(session, ragged)


def _keep(session: Session, row: dict[str, Any]) -> None:
    named = Row(**row)
    row["title"], row["figure"] = (
        f"{named.shape}, {named.layout}, {named.batch}",
        " ".join(figures(named)),
    )
    session.keep(row)
    session.say(f"{row['title']}: {row['figure']}")


def _steps(
    engine: Engine, name: str, warm: dt.PackedBatch, batch: dt.PackedBatch, session: Session
) -> dict[str, Any]:
    """The fields of a row, from a step on the first batch and some on the second."""
    given, device, layout = session.given, session.device, engine.mesh.layout
    spec: Any = engine.model.spec
    first = timed(device, lambda: engine.train_step(warm, SFTLoss()))
    modes: dict[bool, list[float]] = {False: [], True: []} if given.deterministic else {False: []}
    for number in range(
        given.steps + given.deterministic
    ):  # the first deterministic step may compile
        for mode, times in modes.items():
            with deterministic(mode):
                took = timed(device, lambda: engine.train_step(batch, SFTLoss()))
            times += [took] if number >= given.deterministic else []
    seconds = modes[False]
    middle, in_a_row = statistics.median(seconds), None
    if given.steps > 2:
        in_a_row = (
            timed(device, lambda: [engine.train_step(batch, SFTLoss()) for _ in seconds])
            / given.steps
        )
    ranks, peak = layout.num_ranks, peak_flops(device)
    memory = stack_over(torch.tensor(peak_memory_gib(device), device=device), engine.mesh["world"])
    is_7b = given.shape == "7b" and given.length == 8192 and not given.depth and name != "ragged"
    own = str(layout)
    peers = {p.name: session.scaled(p.rate) for p in PEERS if is_7b and p.layout == own}
    row = Row(
        title="",
        figure="",
        shape=given.shape,
        layout=name_of(layout),
        batch=name,
        recompute=given.recompute,
        micro_batches=sum(1 for _ in engine.micro_batches(batch)),
        first_seconds=first,
        seconds=middle,
        all_seconds=seconds,
        seconds_in_a_row=in_a_row,
        deterministic_seconds=statistics.median(modes[True]) if given.deterministic else None,
        tokens_per_second_per_rank=len(batch) / middle / ranks,
        mfu=flops_of(spec, batch) / middle / ranks / peak if peak else None,
        peak_memory_gib=float(memory.max()),
        peers={key: rate for key, rate in peers.items() if rate},
        goal=GOALS.get(own) if is_7b else MOE_BAR if given.shape == "30b-a3b" else None,
        outside_gib=outside_gib(device),
    )
    return dict(vars(row))


def outside_gib(device: torch.device) -> float:
    """Memory of a GPU that is used, but not by torch's allocator; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**30


def traced(
    engine: Engine, spec: ArchSpec, batch: dt.PackedBatch, session: Session, row: Mapping[str, Any]
) -> list[TraceSummary]:
    """One step under the profiler: each rank's trace on the disk, and where its time went.

    Ranks wait for the slowest GPU: a step takes as long as the one that waits least.
    """
    ranks = engine.mesh.layout.num_ranks
    attention = attention_flops_of(spec, batch) / ranks
    rates = {
        "attention": (attention * 7 / 6, ATTENTION_RATE)
    }  # its backward pass computes the scores again
    if session.gemm:
        rates["gemm"] = (flops_of(spec, batch) / ranks - attention, session.gemm)
    if session.device.type != "cuda":
        return [summarize([])]
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        timed(session.device, lambda: engine.train_step(batch, SFTLoss()))
    session.given.out.mkdir(parents=True, exist_ok=True)
    layout = row["layout"].replace("=", "").replace(",", "_")
    path = session.given.out / f"{session.given.name}_{layout}_{dist.get_rank()}.trace.json.gz"
    profiler.export_chrome_trace(str(path))
    mine = summarize(events_of(json.loads(gzip.decompress(path.read_bytes()))), ideal_of(rates))
    every = gather_objects(mine.as_dict(), engine.mesh["world"], session.device)
    return [TraceSummary.of_dict(each) for each in every]


@dataclass
class Timed:
    """Work whose actions are timed on the device."""

    work: TrainingRunner
    device: torch.device
    times: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def buffer(self, micro: int) -> Tensor:
        return self.work.buffer(micro)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        return self._time("forward", stage, partial(self.work.forward, stage, micro, x))

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        return self._time(
            action.kind, action.stage, partial(self.work.backward, action, grad, last=last)
        )

    def weight(self, stage: int, micro: int) -> None:
        self._time("weight", stage, partial(self.work.weight, stage, micro))

    def seconds(self) -> dict[str, float]:
        """Median by "kind stage"."""
        return {
            f"{kind} {stage}": statistics.median(map(_elapsed, pairs))
            for (kind, stage), pairs in self.times.items()
        }

    def _time(self, kind: str, stage: int, run: Any) -> Any:
        before = _now(self.device)
        result = run()
        self.times.setdefault((kind, stage), []).append((before, _now(self.device)))
        return result


def bubbles(engine: Engine, batch: dt.PackedBatch, steps: int) -> tuple[float, float]:
    """The share of all ranks' time that is waiting: measured, and simulated from each stage's measured times."""
    mesh, layout, device = engine.mesh, engine.mesh.layout, engine.mesh.device
    micros = [micro for _, micro in engine.micro_batches(batch)]
    plan = make_plan(layout.schedule, layout.pp, layout.virtual_stages, len(micros))
    found = []
    for _ in range(1 + steps):
        work = TrainingRunner(engine.model, mesh, micros, engine.dtype, SFTLoss())
        timing = Timed(work, device)
        wall = timed(device, lambda timing=timing: execute(plan, timing, mesh))
        work.finish()
        engine.optimizer.step(float(len(batch)))
        stages: dict[str, float] = {}
        for seconds in gather_objects(timing.seconds(), mesh["pp"], device):
            stages |= seconds
        busy = sum(stages[f"{kind} {stage}"] for actions in plan for kind, stage, _ in actions)
        found.append((1 - busy / (layout.pp * wall), simulate(plan, _costs(stages, layout)).bubble))
    measured, predicted = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return measured, predicted


def _costs(seconds: Mapping[str, float], layout: dt.Layout) -> Costs:
    """A whole backward is all `input`: where nothing is split, only the sum counts."""
    stages = range(layout.pp * layout.virtual_stages)
    split = any(key.startswith("weight") for key in seconds)
    return Costs(
        forward=tuple(seconds[f"forward {s}"] for s in stages),
        input=tuple(seconds[f"input {s}" if split else f"backward {s}"] for s in stages),
        weight=tuple(seconds[f"weight {s}"] if split else 0.0 for s in stages),
    )


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(pair: tuple[Any, Any]) -> float:
    before, after = pair
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000


def figures(row: Row) -> Iterator[str]:
    """What a person reads of a row."""
    yield f"{row.seconds:.3f} s a step, {row.tokens_per_second_per_rank:.0f} tokens/s a rank, MFU {_percent(row.mfu)},"
    if row.seconds_in_a_row:
        yield f"{row.seconds_in_a_row:.3f} s in a row of them,"
    if row.deterministic_seconds:
        yield f"deterministic {row.deterministic_seconds:.3f} s ({row.deterministic_seconds / row.seconds:.3f} of it),"
    yield f"{row.peak_memory_gib:.1f} GiB + {row.outside_gib:.1f}, {row.micro_batches} micro-batches, first step"
    yield f"{row.first_seconds:.1f} s"
    if row.goal:
        yield f"| goal {row.goal:.0f}"
    for name, rate in row.peers.items():
        yield f"| {row.tokens_per_second_per_rank / rate:.2f} x {name}"
    if row.ratio_to_dense:
        yield f"| {row.ratio_to_dense:.2f} x dense"
    if row.bubble is not None:
        yield f"| bubble {_percent(row.bubble)}, simulated {_percent(row.predicted_bubble)}"
    if row.trace:
        if row.waiting:
            yield f"| ranks wait {1000 * min(row.waiting):.0f} to {1000 * max(row.waiting):.0f} ms;"
        yield f"exposed communication {1000 * row.trace['exposed']:.0f} ms, losses"
        yield ", ".join(f"{x['name']} {1000 * x['seconds']:.0f}" for x in row.trace["losses"])


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f}%"


if __name__ == "__main__":
    run_main(main)
