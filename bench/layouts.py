"""Step time of one model under several layouts, in one job: torchrun --nproc-per-node 8 -m bench.layouts dp=8 tp=2,dp=4

A layout is written as degrees, and further keys where it needs them: pp=4,dp=2,virtual_stages=2,schedule=interleaved.
Weights and tokens are random. Each layout trains the same global batch; a row is the median of its steps. Under a
pipeline a row also has the bubble: waiting as a share of all ranks' time, measured, and as the simulator predicts it
from the measured times of every stage.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dovetail as dt
from bench.harness import RESULTS, surroundings
from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.build.engine import check_layout, make_decoder, make_mesh
from dovetail.comm import gather_text, stack_over
from dovetail.engine.native import NativeEngine, add_sums
from dovetail.engine.sharding import shard_over_data
from dovetail.engine.stages import Training
from dovetail.kernels.registry import peak_flops, peak_memory_gib
from dovetail.launch import pick_device
from dovetail.optim.assembly import shards_of
from dovetail.pipeline.executor import run as execute
from dovetail.pipeline.schedule import Action, Costs, make_plan, simulate
from dovetail.rl.losses import SFTLoss
from dovetail.weights.pretrained import Origin

QWEN: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "7b": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        **QWEN,
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One layout's figures."""

    layout: str
    length: int
    micro_batches: int
    seconds: float
    tokens_per_second_per_rank: float
    mfu: float | None
    peak_memory_gib: float
    bubble: float | None = None
    predicted_bubble: float | None = None


def layout_of(text: str) -> dt.Layout:
    """Degrees and other keys of a layout: `Layout.parse` knows the degrees alone."""
    degrees, others = [], dict[str, Any]()
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key in ("virtual_stages", "schedule", "cp_mode"):
            others[key] = int(value) if value.isdigit() else value
        else:
            degrees.append(item)
    return replace(dt.Layout.parse(",".join(degrees)), **others)


def main() -> int:
    """Print one table and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description=__doc__)
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=32, help="of the global batch")
    parser.add_argument("--tokens-per-batch", type=int, help="of a replica's micro-batch; default: one sequence")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--name", default="layouts", help="of the JSON file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = pick_device(given.device)
    dt.ensure_process_group(device)
    rows = []
    for text in given.layouts:
        rows.append(measure(layout_of(text), device, given))
        if dist.get_rank() == 0:
            print(shown(rows[-1:]), flush=True)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        print(shown(rows))
        given.out.mkdir(parents=True, exist_ok=True)
        found = {
            **surroundings(),
            "options": {k: str(v) for k, v in vars(given).items()},
            "rows": list(map(vars, rows)),
        }
        (given.out / f"{given.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(layout: dt.Layout, device: torch.device, given: argparse.Namespace) -> Row:
    """Train a few steps under one layout; everything it held is free afterwards."""
    spec = spec_from_config(SHAPES[given.shape])
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = random_engine(spec, layout, device, given)
    draw = torch.Generator().manual_seed(0)
    batch = dt.PackedBatch.pack(
        [torch.randint(spec.vocab_size, (given.length,), generator=draw) for _ in range(given.sequences)]
    )
    reports: list[dt.StepReport] = []
    seconds = [
        timed(device, lambda: reports.append(engine.train_step(batch, SFTLoss()))) for _ in range(1 + given.steps)
    ]
    median = statistics.median(seconds[1:])
    ranks, peak = layout.num_ranks, peak_flops(device)
    memory = stack_over(torch.tensor(peak_memory_gib(device), device=device), engine.mesh["world"])
    row = Row(
        layout=name_of(layout),
        length=given.length,
        micro_batches=sum(1 for _ in engine.micro_batches(batch)),
        seconds=median,
        tokens_per_second_per_rank=len(batch) / median / ranks,
        mfu=reports[-1].flops / median / ranks / peak if peak else None,
        peak_memory_gib=float(memory.max()),
    )
    if layout.pp == 1:
        return row
    measured, predicted = bubbles(engine, batch, given.steps)
    return replace(row, bubble=measured, predicted_bubble=predicted)


def random_engine(spec: ArchSpec, layout: dt.Layout, device: torch.device, given: argparse.Namespace) -> NativeEngine:
    """An engine whose weights were drawn where they lie."""
    mesh, dtype = make_mesh(layout, device), DTYPES[given.dtype]
    check_layout(spec, mesh.layout)
    model = make_decoder(spec, mesh, torch.float32, "lm", given.recompute)
    shard_over_data(model, mesh, dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for shard in shards_of(model, mesh):
            shard.local.fill_(1.0) if shard.name.endswith("norm.weight") else shard.local.normal_(std=0.02)
    return NativeEngine(
        model,
        mesh,
        Origin(lambda _: None, (), {}),
        optim=dt.OptimSettings(lr=1e-6),
        tokens_per_batch=given.tokens_per_batch or given.length,
        dtype=dtype,
    )


@dataclass
class Timed:
    """Work whose actions are timed on the device."""

    work: Training
    device: torch.device
    times: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def buffer(self, micro: int) -> Tensor:
        return self.work.buffer(micro)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        return self._time("forward", stage, partial(self.work.forward, stage, micro, x))

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        return self._time(action.kind, action.stage, partial(self.work.backward, action, grad, last=last))

    def weight(self, stage: int, micro: int) -> None:
        self._time("weight", stage, partial(self.work.weight, stage, micro))

    def seconds(self) -> dict[str, float]:
        """Median by "kind stage"."""
        return {
            f"{kind} {stage}": statistics.median(map(_elapsed, pairs)) for (kind, stage), pairs in self.times.items()
        }

    def _time(self, kind: str, stage: int, run: Any) -> Any:
        before = _now(self.device)
        result = run()
        self.times.setdefault((kind, stage), []).append((before, _now(self.device)))
        return result


def bubbles(engine: NativeEngine, batch: dt.PackedBatch, steps: int) -> tuple[float, float]:
    """The share of all ranks' time that is waiting: measured, and simulated from each stage's measured times."""
    mesh, layout, device = engine.mesh, engine.mesh.layout, engine.mesh.device
    micros = [micro for _, micro in engine.micro_batches(batch)]
    plan = make_plan(layout.schedule, layout.pp, layout.virtual_stages, len(micros))
    found = []
    for _ in range(1 + steps):
        sums: dict[str, Any] = {}
        work = Training(engine.model, mesh, micros, engine.dtype, SFTLoss(), partial(add_sums, sums))
        timing = Timed(work, device)
        wall = timed(device, lambda timing=timing: execute(plan, timing, mesh))
        work.finish()
        engine.optimizer.step(float(len(batch)))
        stages: dict[str, float] = {}
        for text in gather_text(json.dumps(timing.seconds()), mesh["pp"], device):
            stages |= json.loads(text)
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


def timed(device: torch.device, run: Any) -> float:
    """Seconds from when all ranks start until this device is done, the longest of all ranks."""
    _wait(device)
    dist.barrier()
    start = time.perf_counter()
    run()
    _wait(device)
    told = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(pair: tuple[Any, Any]) -> float:
    before, after = pair
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000


def name_of(layout: dt.Layout) -> str:
    """As `layout_of` reads it."""
    extras = {"virtual_stages": 1, "schedule": "1f1b", "cp_mode": "auto"}
    return ",".join([str(layout), *(f"{k}={getattr(layout, k)}" for k, v in extras.items() if getattr(layout, k) != v)])


def shown(rows: list[Row]) -> str:
    """What a person reads."""
    head = f"{'layout':52}{'length':>8}{'micro':>6}{'s/step':>9}{'tok/s/rank':>12}{'MFU':>7}{'GiB':>7}{'bubble':>8}{'simul.':>8}"
    lines = [
        f"{r.layout:52}{r.length:8}{r.micro_batches:6}{r.seconds:9.3f}{r.tokens_per_second_per_rank:12.0f}"
        f"{_percent(r.mfu):>7}{r.peak_memory_gib:7.1f}{_percent(r.bubble):>8}{_percent(r.predicted_bubble):>8}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
