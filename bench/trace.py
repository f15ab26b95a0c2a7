"""Says where the GPU time of one step went: by kind of kernel, exposed communication, idle gaps, largest losses.

`summarize` is a pure function of events; `recorded` gets them from a run, `events_of` from a Chrome trace of
torch.profiler. Every instant of the step counts once: as compute where any kernel computes, as exposed communication
where only NCCL or copies between GPUs run, as copies where only other ones do, as idle where nothing runs. So the losses and
the ideal add up to the step, but for what kinds of compute hide of each other on several streams.
"""

import itertools
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

COMMUNICATION, COPY, OTHER = "communication", "copies", "other"
# The first that is found in a kernel's name. Names: cuBLAS (nvjet, xmma, cutlass), cuDNN and FlashAttention, Triton's
# and inductor's, torch's own.
KINDS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|^Memcpy PtoP"),
    (COPY, r"^Mem(cpy|set)"),
    ("attention", r"flash|sdpa|fmha|attention|attncute"),
    ("head rows", r"_row_stats|_row_grad|vocab"),
    ("optimizer", r"multi_tensor_apply|Adam|lpnorm"),
    ("sharding copies", r"chunk_cat|split_with_sizes_copy"),
    ("experts", r"grouped|GroupProblem|permute|moe"),
    ("gemm", r"nvjet|gemm|xmma|cutlass|cublas|gemv|splitk|wgmma"),
    ("norm, rope, swiglu", r"norm|rope|rotary|swiglu|silu|triton"),
    (
        "elementwise",
        r"elementwise|reduce_kernel|CatArray|index|scatter|gather|fill|copy|softmax|sort|scan",
    ),
)
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
)  # calls for which the host stops
SHOWN_LOSSES, SHOWN_KERNELS = 5, 12


@dataclass(frozen=True)
class Event:
    """Something that ran on the GPU, or a runtime call of the host (`stream` None). Seconds."""

    name: str
    start: float
    seconds: float
    stream: int | None = 0

    @property
    def stop(self) -> float:
        return self.start + self.seconds

    @property
    def kind(self) -> str:
        return kind_of(self.name)


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel."""

    name: str
    kind: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Loss:
    """Seconds of the step beyond those that its ideal would take, and as a share of the step."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class TraceSummary:
    """Where one step's time went, in seconds.

    step: from the first kernel's start to the last one's end. by_kind: sums of kernels' times, which may overlap.
    exposed: NCCL and copies between GPUs, alone on the GPU. copying: other copies alone, or beside these. idle: nothing at
    all, in `gaps` pieces.
    ideal: of each kind that has one. losses: the largest, largest first. kernels: those that took longest.
    waits: how often the host waited for the device.
    """

    step: float
    by_kind: dict[str, float]
    exposed: float
    copying: float
    idle: float
    gaps: int
    longest_gap: float
    ideal: dict[str, float]
    losses: tuple[Loss, ...]
    kernels: tuple[Kernel, ...]
    waits: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> "TraceSummary":
        """What `as_dict` gave."""
        losses, kernels = (
            (Loss(**x) for x in found["losses"]),
            (Kernel(**x) for x in found["kernels"]),
        )
        return cls(**{**found, "losses": tuple(losses), "kernels": tuple(kernels)})

    @property
    def waiting(self) -> float:
        """Seconds in which nothing computes and nothing is copied within the GPU."""
        return self.exposed + self.idle

    def table(self) -> str:
        """What a person reads, in milliseconds."""
        rows = [f"{'step':40}{_ms(self.step)}"]
        for kind, seconds in self.by_kind.items():
            note = f"   ideal {_ms(self.ideal[kind]).strip()}" if kind in self.ideal else ""
            rows.append(f"  {kind:38}{_ms(seconds)}{note}")
        rows.append(f"{'exposed communication':40}{_ms(self.exposed)}")
        rows.append(f"{'copies alone':40}{_ms(self.copying)}")
        rows.append(
            f"{'idle':40}{_ms(self.idle)}   {self.gaps} gaps, the longest {_ms(self.longest_gap).strip()}"
        )
        rows.append(f"{'waits of the host':40}{self.waits:10}")
        rows.append("largest losses")
        rows += [
            f"  {loss.name:38}{_ms(loss.seconds)}{100 * loss.share:7.1f}%" for loss in self.losses
        ]
        rows.append("longest kernels")
        rows += [f"  {k.name[:38]:38}{_ms(k.seconds)}   {k.calls} x {k.kind}" for k in self.kernels]
        return "\n".join(rows)


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def ideal_of(work: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Seconds by kind from (FLOPs, FLOP/s) of each: {"gemm": (flops, 722e12), "attention": (flops, 600e12)}."""
    return {kind: flops / rate for kind, (flops, rate) in work.items()}


def summarize(events: Iterable[Event], ideal: Mapping[str, float] | None = None) -> TraceSummary:
    """Where the step of these events went. `ideal`: seconds that a kind could not do without; of any other kind 0."""
    found = list(events)
    ran = [e for e in found if e.stream is not None]
    ideal, kinds, kernels = (
        dict(ideal or {}),
        defaultdict[str, float](float),
        defaultdict[str, list[Event]](list),
    )
    for event in ran:
        kinds[event.kind] += event.seconds
        kernels[event.name].append(event)
    start, stop = min((e.start for e in ran), default=0.0), max((e.stop for e in ran), default=0.0)
    computing = _union(e for e in ran if e.kind not in (COMMUNICATION, COPY))
    copying = _union(e for e in ran if e.kind != COMMUNICATION)
    busy = _union(ran)
    gaps = [after - before for (_, before), (after, _) in itertools.pairwise(busy)]
    # Copies beside NCCL count as copies: what waits for both is lost either way, and counts once.
    exposed, alone = _length(busy) - _length(copying), _length(copying) - _length(computing)
    lost = {"exposed communication": exposed, "copies alone": alone, "idle": sum(gaps)}
    for kind in {*kinds, *ideal} - {COMMUNICATION, COPY}:
        lost[kind] = _length(_union(e for e in ran if e.kind == kind)) - ideal.get(kind, 0.0)
    step = stop - start
    losses = sorted(
        (Loss(name, x, x / step if step else 0.0) for name, x in lost.items()),
        key=lambda x: -x.seconds,
    )
    longest = [
        Kernel(name, kind_of(name), sum(e.seconds for e in runs), len(runs))
        for name, runs in kernels.items()
    ]
    return TraceSummary(
        step=step,
        by_kind=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        exposed=exposed,
        copying=alone,
        idle=sum(gaps),
        gaps=len(gaps),
        longest_gap=max(gaps, default=0.0),
        ideal=ideal,
        losses=tuple(losses[:SHOWN_LOSSES]),
        kernels=tuple(sorted(longest, key=lambda k: -k.seconds)[:SHOWN_KERNELS]),
        waits=sum(Counter(e.name for e in found if e.stream is None)[name] for name in WAITS),
    )


def recorded(run: Callable[[], object]) -> list[Event]:
    """What a GPU does in `run`, which should have run before: a first time compiles and allocates."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(events_of(json.loads(path.read_text(encoding="utf-8"))))


def events_of(trace: Mapping[str, Any]) -> Iterator[Event]:
    """Kernels, copies and runtime calls of a Chrome trace, whose times are in microseconds."""
    for event in trace["traceEvents"]:
        category = event.get("cat")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            stream = event.get("args", {}).get("stream", event.get("tid", 0))
            yield Event(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, int(stream))
        elif category in ("cuda_runtime", "cuda_driver"):
            yield Event(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, None)


def _union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """When at least one of them runs: (start, stop), in order, without touching each other."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda e: e.start):
        if found and event.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], event.stop))
        else:
            found.append((event.start, event.stop))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:10.1f}"
