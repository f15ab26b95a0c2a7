"""What benchmarks of engines share: shapes of known models with random weights, RL's lengths, a clock over all ranks, the
peers' recorded figures, and rows that are safe on the disk before the next one begins."""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import dovetail as dt
from bench.given import check_shape
from bench.harness import RESULTS, surroundings
from bench.limit import Limit
from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.engine.fsdp import shard_over_data
from dovetail.engine.native import Engine
from dovetail.factory.engine import make_decoder, make_mesh
from dovetail.factory.layouts import check_layout
from dovetail.kernels.registry import kernels_for
from dovetail.nn.activation_checkpoint import PinnedPool, Recompute
from dovetail.nn.tiling import tile_mlps
from dovetail.optim.optimizer import shards_of
from dovetail.parallel.process_group import num_ranks_here, pick_device
from dovetail.weights.hf_directory import CheckpointSource

OFFLOAD = ("activations", "optimizer")  # what may wait on the host
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GEMM = (
    8192,
    3584,
    152064,
)  # tokens, width and vocabulary of the product whose rate tells how fast the machine is
RECORDED_GEMM = 722e12  # its rate where the peers were recorded

_QWEN: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 23,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def _dense(
    vocab: int, width: int, ffn: int, depth: int, heads: tuple[int, int], **others: Any
) -> Mapping[str, Any]:
    sizes = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": depth,
    }
    return {
        **_QWEN,
        **sizes,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **others,
    }


def _experts(dense: Mapping[str, Any], experts: int, ffn: int, head_dim: int) -> Mapping[str, Any]:
    sizes = {
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": ffn,
        "head_dim": head_dim,
    }
    return {**dense, **sizes, "model_type": "qwen3_moe", "norm_topk_prob": True}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "7b": _dense(152064, 3584, 18944, 28, (28, 4)),
    "3b": _dense(151936, 2048, 11008, 36, (16, 2), tie_word_embeddings=True),
    "1.5b": _dense(151936, 1536, 8960, 28, (12, 2), tie_word_embeddings=True),
    "0.5b": _dense(151936, 896, 4864, 24, (14, 2), tie_word_embeddings=True),
    "30b-a3b": _experts(_dense(151936, 2048, 6144, 48, (32, 4)), 128, 768, 128),
    "tiny": _dense(1000, 64, 128, 8, (8, 2)),
    "tiny-moe": _experts(_dense(1000, 64, 128, 4, (8, 2)), 16, 32, 16),
}


@dataclass(frozen=True)
class Peer:
    """A recorded tokens/s a GPU on the 7B shape, 8 GPUs, 8192-token documents, 32 of them a step."""

    name: str
    layout: str
    rate: float


PEERS = (
    Peer("Megatron-Core 0.19.2 + TransformerEngine 2.20.2", "dp=8", 11551),
    Peer("Megatron-Core 0.19.2 + TransformerEngine 2.20.2", "tp=2,dp=4", 10526),
    Peer("Megatron-Core 0.19.2 + TransformerEngine 2.20.2", "tp=4,pp=2", 7289),
    Peer("transformers + FSDP2 + torch.compile", "dp=8", 8974),
)
GOALS: Mapping[str, float] = {"dp=8": 12500, "tp=2,dp=4": 11500, "tp=4,pp=2": 9500}
MOE_BAR = 8655  # published tokens/s/GPU of the 30b-a3b shape, natural routing, 16 H100


def layout_of(text: str) -> dt.Layout:
    """Also with the keys that `Layout.parse` does not know."""
    degrees, others = [], dict[str, Any]()
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key in ("virtual_stages", "schedule", "cp_mode"):
            others[key] = int(value) if value.isdigit() else value
        else:
            degrees.append(item)
    return replace(dt.Layout.parse(",".join(degrees)), **others)


def name_of(layout: dt.Layout) -> str:
    """As `layout_of` reads it."""
    extras = {"virtual_stages": 1, "schedule": "1f1b", "cp_mode": "auto"}
    return ",".join(
        [
            str(layout),
            *(f"{k}={getattr(layout, k)}" for k, v in extras.items() if getattr(layout, k) != v),
        ]
    )


def random_engine(
    spec: ArchSpec,
    layout: dt.Layout,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens_per_batch: int | None = None,
    recompute: Recompute = "none",
    mlp_tile_tokens: int = 0,
    offload: Collection[str] = (),
) -> Engine:
    """An engine whose weights were drawn where they lie: nothing is made on the host. Collective.

    offload: what waits on the host, of "activations" (what is kept for recomputing) and "optimizer" (its moments).
    """
    mesh = make_mesh(layout, device)
    check_layout(spec, mesh.layout)
    model = make_decoder(spec, mesh, torch.float32, "lm", recompute)
    if mlp_tile_tokens:
        tile_mlps(model.text, mlp_tile_tokens)
    if "activations" in offload:
        model.text.host = PinnedPool(mesh.device, ranks=num_ranks_here(mesh.device))
    shard_over_data(model, mesh, dtype)
    model.materialize(device)
    with torch.no_grad():
        for shard in shards_of(model, mesh):
            shard.local.fill_(1.0) if shard.name.endswith("norm.weight") else shard.local.normal_(
                std=0.02
            )
    return Engine(
        model,
        mesh,
        CheckpointSource(lambda _: torch.bfloat16, (), {}),
        optim=dt.OptimSettings(lr=1e-6, on_host="optimizer" in offload),
        tokens_per_batch=tokens_per_batch,
        dtype=dtype,
    )


def spec_of(shape: str, **changes: Any) -> ArchSpec:
    """A shape's spec, with some of its config's keys changed."""
    return spec_from_config({**SHAPES[shape], **changes})


def dense_batch(spec: ArchSpec, length: int, sequences: int) -> dt.PackedBatch:
    """Sequences of one length, of random tokens."""
    return random_tokens(spec, [length] * sequences)


def ragged_batch(spec: ArchSpec, longest: int, tokens: int) -> dt.PackedBatch:
    """Lengths as RL samples have them, up to `longest` and a quarter of it in the mean, of so many tokens in all."""
    draw, lengths = torch.Generator().manual_seed(2), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        normal = float(torch.randn((), generator=draw))
        drawn = (
            longest * 0.2 * 2.718281828 ** (0.85 * normal)
        )  # mean 0.25 longest, once those above it are cut
        lengths.append(max(1, min(int(drawn), longest, left)))
    return random_tokens(spec, lengths)


def random_tokens(spec: ArchSpec, lengths: list[int]) -> dt.PackedBatch:
    """Made without a list of a million numbers, which `pack` would go through one by one."""
    total, draw = sum(lengths), torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab_size, (total,), generator=draw)
    ends = torch.tensor(lengths).cumsum(0)
    counted = torch.ones(total, dtype=torch.bool)
    counted[ends - 1] = False
    return dt.PackedBatch(
        tokens=tokens,
        positions=torch.arange(total)
        - torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths)),
        cu_seqlens=torch.cat((torch.zeros(1), ends)).to(torch.int32),
        targets=tokens.roll(-1).where(counted, 0),
        mask=counted,
        lengths=tuple(lengths),
    )


def flops_of(spec: ArchSpec, batch: dt.PackedBatch) -> float:
    """Of a training step: 6 a weight that a token meets (the table of embeddings is none) and causal attention.

    For a dense model (6 (N - V D) + 6 L D T) a token, N all parameters, T the length of its sequence.
    """
    return 3.0 * sum(spec.flops(n) for n in batch.lengths)


def attention_flops_of(spec: ArchSpec, batch: dt.PackedBatch) -> float:
    """The part of them that is causal attention's."""
    return 3.0 * sum(spec.flops(n) - 2.0 * spec.linear_params * n for n in batch.lengths)


def wait(device: torch.device) -> None:
    """Until the device has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds from when all ranks start until the last one's device is done."""
    wait(device)
    dist.barrier()
    start = time.perf_counter()
    run()
    wait(device)
    told = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def gemm_rate(device: torch.device) -> float | None:
    """FLOP/s of the product of `GEMM`, on random numbers, all ranks at once, the mean of their medians; None on a CPU."""
    if device.type != "cuda":
        return None
    n, width, vocab = GEMM
    a = torch.randn(n, width, device=device, dtype=torch.bfloat16)
    b = torch.randn(vocab, width, device=device, dtype=torch.bfloat16)
    found = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(a, b.T)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    rate = torch.tensor(
        2.0 * n * width * vocab / median(found[5:]), dtype=torch.float64, device=device
    )
    dist.all_reduce(rate)
    del a, b
    torch.cuda.empty_cache()
    return float(rate) / dist.get_world_size()


def launch_seconds(device: torch.device) -> float | None:
    """Host time of one kernel launch, the median of ten rounds of 1000; None on a CPU."""
    if device.type != "cuda":
        return None
    x, found = torch.zeros(1, device=device), []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            x.add_(1.0)
        found.append((time.perf_counter() - start) / 1000)
    torch.cuda.synchronize()
    return median(found)


def leave(
    limit: Limit, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End this process with what went wrong. Its normal end would wait for kernels that wait for other ranks."""
    traceback.print_exception(kind, error, trace, file=limit.terminal)
    limit.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """What every such benchmark takes."""
    parser.add_argument("--device", default="auto")
    parser.add_argument("--name", default=name, help="of the JSON file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--row-seconds", type=float, default=600.0, help="a row that takes longer ends the program"
    )


@dataclass
class Session:
    """The ranks of a benchmark, and its rows: each is on the disk when it is done, and one that takes too long is named."""

    given: argparse.Namespace
    device: torch.device
    gemm: float | None
    launch: float | None
    limit: Limit
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, given: argparse.Namespace) -> "Session":
        """Collective."""
        device = pick_device(given.device)
        check_shape(getattr(given, "shape", "tiny"), device.type)
        rank = int(os.environ.get("RANK", "0"))
        limit = Limit(
            given.name, rank, given.row_seconds, given.out / f"{given.name}.stacks.log.{rank}"
        )
        dt.ensure_process_group(device)
        sys.excepthook = partial(
            leave, limit
        )  # torch's own, from now on, writes only once the one before it has returned
        torch.manual_seed(dist.get_rank())
        return cls(given, device, gemm_rate(device), launch_seconds(device), limit)

    def begin(self, row: str) -> None:
        """A row begins: an empty device, and a new time limit."""
        self.limit.begin(row)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def keep(self, row: Any) -> None:
        """A row is done: write all rows so far."""
        self.rows.append(row if isinstance(row, dict) else asdict(row))
        if dist.get_rank() == 0:
            self.given.out.mkdir(parents=True, exist_ok=True)
            options = {key: str(value) for key, value in vars(self.given).items()}
            kernels = kernels_for(self.device).describe()
            found = {
                **surroundings(),
                "ranks": dist.get_world_size(),
                "gemm_flops": self.gemm,
                "launch_seconds": self.launch,
                "kernels": kernels,
            }
            text = json.dumps({**found, "options": options, "rows": self.rows}, indent=1) + "\n"
            fresh = self.given.out / f".{self.given.name}.json"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(
                self.given.out / f"{self.given.name}.json"
            )  # whole, whenever this process is killed
        dist.barrier()

    def say(self, text: str) -> None:
        """On the terminal, once."""
        if dist.get_rank() == 0:
            print(text, flush=True)

    def scaled(self, rate: float) -> float | None:
        """A recorded rate on a machine whose products are as fast as this one's."""
        return None if self.gemm is None else rate * self.gemm / RECORDED_GEMM

    def finish(self) -> None:
        """Part; the limit holds for that, too."""
        dist.destroy_process_group()
        self.limit.close()
