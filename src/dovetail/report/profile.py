"""Summaries of profiled steps."""

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from dovetail.report.read import Row, number

FOLDER, MOST_SHOWN = "profile", 8  # steps
Longest = list[tuple[str, float, int]]  # name, seconds of its own, calls


class PhaseSummary(BaseModel):
    """In seconds. waiting: in collectives while nothing computes. The rest is the host's."""

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
    steps: dict[int, list[Summary]] = {}
    for path in (run / FOLDER).glob("step-*/rank-*.json"):
        with suppress(OSError, ValidationError):
            summary = Summary.model_validate_json(path.read_bytes())
            steps.setdefault(summary.step, []).append(summary)
    return [_shown(sorted(steps[step], key=lambda each: each.rank)) for step in sorted(steps)[-MOST_SHOWN:]]


def _shown(ranks: list[Summary]) -> Row:
    """Times of all ranks; longest operators of the first."""
    first, phases = ranks[0], list[Row]()
    for name, phase in first.phases.items():
        all_ranks = [each.phases[name] for each in ranks if name in each.phases]
        longest = {"kernels": phase.kernels, "operators": phase.operators}
        row: Row = {"name": name, "peak_gib": number(max(each.peak_bytes or 0 for each in all_ranks) / 2**30)}
        row |= {time: [number(vars(each)[time]) for each in all_ranks] for time in ("seconds", "computing", "waiting")}
        row["parts"] = {part: number(seconds) for part, seconds in phase.parts.items()}
        row["longest"] = {
            kind: [[own, number(seconds), calls] for own, seconds, calls in rows]
            for kind, rows in longest.items()
            if rows
        }
        phases.append(row)
    return {"step": first.step, "device": first.device, "rank": first.rank, "ranks": len(ranks), "phases": phases}
