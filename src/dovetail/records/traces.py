"""Profiled steps: torch.profiler traces summed up by phase, and these summaries for the page."""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from dovetail.launch.progress import PHASES
from dovetail.records.runs import Row

FOLDER = "profile"
Longest = list[tuple[str, float, int]]  # name, seconds of its own, calls
PARTS = ("forward", "backward")  # of an update
SHOWN = 10
NAME_LENGTH = 160  # operators and kernels of a phase; characters of a name
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
CPU = 0  # type of a device


class PhaseSummary(BaseModel):
    """Times of a phase in seconds. waiting: in collectives while nothing computes. The rest is the host's."""

    seconds: float
    computing: float
    collectives: float
    waiting: float
    parts: dict[str, float]
    operators: Longest  # of the host
    kernels: Longest  # of a GPU, in the phase that launched them
    peak_bytes: int | None


class Summary(BaseModel):
    """The profile of one rank. events: of its trace."""

    step: int
    rank: int
    device: str
    events: int
    phases: dict[str, PhaseSummary]


class Event(NamedTuple):
    """Times in microseconds. launch: correlation with the host's call."""

    start: float
    stop: float
    name: str
    thread: int | str
    launch: int | None


def read_events(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", errors="replace") as file:
        events: list[Row] = json.load(file, strict=False)["traceEvents"]
    return events


def summarize(events: Iterable[Row], step: int, rank: int, device: str) -> Summary:
    trace = _Trace()
    for event in events:
        trace.add(event)
    return Summary(step=step, rank=rank, device=device, events=trace.events, phases=trace.summary())


class _Trace:
    """collectives: on a GPU, or gloo's."""

    def __init__(self) -> None:
        self.phases = list[Event]()
        self.parts = list[Event]()
        self.operators = list[Event]()
        self.kernels = list[Event]()
        self.collectives = list[Event]()
        self.launched: dict[int, float] = {}
        self.allocated: list[tuple[float, int, int]] = []  # when, type of the device, bytes
        self.starts: list[float] = []  # of phases
        self.events = 0

    def add(self, event: Row) -> None:
        kind = event.get("cat")
        name = str(event.get("name", ""))
        arguments = event.get("args") or {}
        self.events += 1
        if name == "[memory]":
            device_type = arguments["Device Type"]
            self.allocated.append((event["ts"], device_type, arguments["Total Allocated"]))
        if event.get("ph") != "X":
            return
        start = float(event["ts"])
        stop = start + float(event["dur"])
        launch = arguments.get("correlation")
        spent = Event(start, stop, name[:NAME_LENGTH], event.get("tid", 0), launch)
        if kind == "cpu_op":
            self.operators.append(spent)
        elif kind in LAUNCHES and launch is not None:
            self.launched[launch] = start
        elif kind in ON_GPU:
            is_collective = "nccl" in name.lower()
            events = self.collectives if is_collective else self.kernels
            events.append(spent)
        elif kind == "user_annotation" and name in PHASES:
            self.phases.append(spent)
        elif kind == "user_annotation" and name in PARTS:
            self.parts.append(spent)
        elif kind == "user_annotation" and name.startswith("gloo:"):
            self.collectives.append(spent)

    def summary(self) -> dict[str, PhaseSummary]:
        self.phases.sort()
        self.starts = [phase.start for phase in self.phases]
        own = _by(self._phase_of, _own_times(self.operators))
        all_kernels = [*self.kernels, *self.collectives]
        on_gpu = [event for event in all_kernels if event.launch is not None]
        kernels = _by(self._phase_of, ((event, event.stop - event.start) for event in on_gpu))
        computing = self.kernels
        if not computing:
            computing = [event for event in self.operators if event.name.startswith("aten::")]
        spans = {
            "computing": computing,
            "collectives": self.collectives,
            "any": chain(computing, self.collectives),
        }
        merged = {name: _merged(events) for name, events in spans.items()}
        peaks = self._peaks()
        phases = dict[str, PhaseSummary]()
        for name in dict.fromkeys(phase.name for phase in self.phases):
            windows = [(phase.start, phase.stop) for phase in self.phases if phase.name == name]
            spent = {kind: _overlap(windows, spans) / 1e6 for kind, spans in merged.items()}
            parts = defaultdict[str, float](float)
            for part in self.parts:
                if self._phase_of(part) == name:
                    parts[part.name] += (part.stop - part.start) / 1e6
            phases[name] = PhaseSummary(
                seconds=sum(stop - start for start, stop in windows) / 1e6,
                computing=spent["computing"],
                collectives=spent["collectives"],
                waiting=spent["any"] - spent["computing"],
                parts=parts,
                operators=_longest(own[name]),
                kernels=_longest(kernels[name]),
                peak_bytes=peaks.get(name),
            )
        return phases

    def _phase_of(self, event: Event) -> str:
        """GPU work counts where it was launched."""
        if event.launch is None:
            return self._phase_at(event.start)
        return self._phase_at(self.launched.get(event.launch, event.start))

    def _phase_at(self, time: float) -> str:
        before = bisect_right(self.starts, time)
        return self.phases[before - 1].name if before else ""

    def _peaks(self) -> Mapping[str, int]:
        """Bytes by phase, of the GPU if there is one."""
        types = {kind for _, kind, _ in self.allocated}
        peaks = defaultdict[str, int](int)
        for time, kind, allocated in self.allocated:
            if (kind == CPU) == (types == {CPU}):
                name = self._phase_at(time)
                peaks[name] = max(peaks[name], allocated)
        return peaks


def _by(
    key: Callable[[Event], str], times: Iterable[tuple[Event, float]]
) -> defaultdict[str, dict[str, tuple[float, int]]]:
    """Seconds and calls by phase and name."""
    phases = defaultdict[str, dict[str, tuple[float, int]]](dict)
    for event, time in times:
        names = phases[key(event)]
        seconds, calls = names.get(event.name, (0.0, 0))
        names[event.name] = seconds + time / 1e6, calls + 1
    return phases


def _longest(names: Mapping[str, tuple[float, int]]) -> list[tuple[str, float, int]]:
    order = sorted(names.items(), key=lambda item: -item[1][0])[:SHOWN]
    return [(name, seconds, calls) for name, (seconds, calls) in order]


def _own_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yields each event with its time without the events inside it."""
    ordered = sorted(events, key=lambda event: (str(event.thread), event.start, -event.stop))
    for _, thread in groupby(ordered, lambda event: event.thread):
        open_events: list[tuple[Event, float]] = []  # and their own time so far
        for event in chain(thread, [Event(math.inf, math.inf, "", 0, None)]):
            while open_events and open_events[-1][0].stop <= event.start:
                yield open_events.pop()
            if open_events:
                outer, time = open_events[-1]
                inside = min(event.stop, outer.stop) - event.start
                open_events[-1] = outer, time - inside
            open_events.append((event, event.stop - event.start))


def _merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for start, stop in sorted((event.start, event.stop) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return spans


def _overlap(windows: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> float:
    total = 0.0
    at = 0
    for start, stop in windows:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        for low, high in spans[at:] if at < len(spans) else ():
            if low >= stop:
                break
            total += min(high, stop) - max(low, start)
    return total
