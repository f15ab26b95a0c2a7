"""What profiled steps took: the files of run_dir/profile."""

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from dovetail.report.read import Row, number

FOLDER, MOST_SHOWN = "profile", 8  # steps
Longest = list[tuple[str, float, int]]  # name, seconds of its own, calls


class PhaseSummary(BaseModel):
    """Seconds. computing: of a GPU, else of operators; waiting: in collectives while nothing computes. The rest is the host's."""

    seconds: float
    computing: float
    collectives: float
    waiting: float
    parts: dict[str, float]
    operators: Longest  # of the host
    kernels: Longest  # of a GPU, in the phase that launched them
    peak_bytes: int | None


class Summary(BaseModel):
    """Of one rank. events: of its trace."""

    step: int
    rank: int
    device: str
    events: int
    phases: dict[str, PhaseSummary]


def read_profiles(run: Path) -> list[Row]:
    """The last profiled steps, for the page. Torn files are left out."""
    steps: dict[int, list[Summary]] = {}
    for path in (run / FOLDER).glob("step-*/rank-*.json"):
        with suppress(OSError, ValidationError):
            summary = Summary.model_validate_json(path.read_bytes())
            steps.setdefault(summary.step, []).append(summary)
    return [_shown(sorted(steps[step], key=lambda each: each.rank)) for step in sorted(steps)[-MOST_SHOWN:]]


def _shown(ranks: list[Summary]) -> Row:
    """Times of all ranks, what took longest on the first."""
    first = ranks[0]
    return {
        "step": first.step,
        "device": first.device,
        "rank": first.rank,
        "ranks": len(ranks),
        "phases": [
            {
                "name": name,
                **{
                    time: [number(getattr(each.phases[name], time)) for each in ranks if name in each.phases]
                    for time in ("seconds", "computing", "waiting")
                },
                "peak_gib": number(
                    max(each.phases[name].peak_bytes or 0 for each in ranks if name in each.phases) / 2**30
                ),
                "parts": {part: number(seconds) for part, seconds in phase.parts.items()},
                "longest": {
                    kind: [[own, number(seconds), calls] for own, seconds, calls in rows]
                    for kind, rows in (("kernels", phase.kernels), ("operators", phase.operators))
                    if rows
                },
            }
            for name, phase in first.phases.items()
        ],
    }
