"""Times of single operations on a device: interleaved, medians, and without what the host needs between two of them.

An operation of some microseconds is over before the host has sent the next one, so several are sent between two marks on the
device's own clock, after one that keeps it waiting for that long. It only waits: products instead would heat the card, and
what follows would run at a lower clock.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Run = Callable[[], object]
WAIT = 12_000_000  # cycles, about 7 ms, in which the host sends what is timed


def milliseconds(
    runs: Mapping[str, Run], device: torch.device, rounds: int = 7, each: int = 5
) -> dict[str, float]:
    """The median over `rounds` of each run's time; a round takes every run in turn, `each` times in a row."""
    for run in runs.values():
        run(), run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(_time(run, each, device))
    return {name: median(times) for name, times in found.items()}


def _time(run: Run, each: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(each):
            run()
        return 1e3 * (time.perf_counter() - start) / each
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT)
    before.record()
    for _ in range(each):
        run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / each
