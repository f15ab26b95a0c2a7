"""Compares ours with a peer in one process: runs interleaved, medians, and the ratio peer / ours.

The machine may be shared, so a bare number of seconds says little: each round runs both, one right after the other,
and the ratio is the median of the rounds' ratios. Processor seconds stand beside the wall's; they see no neighbor.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """One comparison. `ours` and `peer` do the same work on `tokens` real tokens (padding not counted)."""

    name: str
    tokens: int
    ours: Callable[[], object]
    peer: Callable[[], object]


@dataclass(frozen=True)
class Result:
    """Medians of a case. Ratios above 1: ours is faster."""

    name: str
    tokens: int
    ours_seconds: float
    peer_seconds: float
    ratio: float
    cpu_ratio: float
    ratios: list[float]


def compare(case: Case, rounds: int) -> Result:
    """One round unmeasured, then `rounds` of both; every other round starts with the peer."""
    case.ours(), case.peer()
    ours: list[tuple[float, float]] = []
    peer: list[tuple[float, float]] = []
    for i in range(rounds):
        for which in (ours, peer) if i % 2 == 0 else (peer, ours):
            which.append(_seconds(case.ours if which is ours else case.peer))
    ratios = [p[0] / o[0] for o, p in zip(ours, peer, strict=True)]
    return Result(
        name=case.name,
        tokens=case.tokens,
        ours_seconds=statistics.median(wall for wall, _ in ours),
        peer_seconds=statistics.median(wall for wall, _ in peer),
        ratio=statistics.median(ratios),
        cpu_ratio=statistics.median(p[1] / o[1] for o, p in zip(ours, peer, strict=True)),
        ratios=[round(r, 3) for r in ratios],
    )


def table(results: Sequence[Result]) -> str:
    """What a person reads."""
    head = f"{'case':44} {'tokens':>7} {'ours tok/s':>11} {'peer tok/s':>11} {'peer/ours':>9} {'cpu':>6}"
    rows = [
        f"{r.name:44} {r.tokens:7} {r.tokens / r.ours_seconds:11.0f} {r.tokens / r.peer_seconds:11.0f} "
        f"{r.ratio:9.2f} {r.cpu_ratio:6.2f}"
        for r in results
    ]
    return "\n".join([head, *rows])


def write(name: str, results: Sequence[Result], load_before: Sequence[float]) -> Path:
    """What a machine reads: results with hardware, versions, date, command and the load average before and after."""
    load = {"before": list(load_before), "after": list(os.getloadavg())}
    found = {
        "bench": name,
        **surroundings(),
        "load_average": load,
        "results": [asdict(r) for r in results],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


def surroundings() -> dict[str, object]:
    """What a figure depends on beside the code: date, command, hardware and versions."""
    hardware: dict[str, object] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        hardware["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "hardware": hardware,
        "versions": {"python": platform.python_version()}
        | {package: metadata.version(package) for package in ("torch", "transformers", "numpy")},
    }


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
    """(wall, processor) seconds of one run."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def _processor() -> str:
    """What the processor calls itself, where the system tells."""
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.is_file()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.machine()
