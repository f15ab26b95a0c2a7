"""Summaries of profiled steps for the page."""

from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from dovetail.records.runs import Row, number
from dovetail.records.traces import FOLDER, Summary

MAX_STEPS = 8


def read_profiles(run: Path) -> list[Row]:
    steps: dict[int, list[Summary]] = {}
    for path in (run / FOLDER).glob("step-*/rank-*.json"):
        with suppress(OSError, ValidationError):
            summary = Summary.model_validate_json(path.read_bytes())
            steps.setdefault(summary.step, []).append(summary)
    return [
        _shown(sorted(steps[step], key=lambda each: each.rank))
        for step in sorted(steps)[-MAX_STEPS:]
    ]


def _shown(ranks: list[Summary]) -> Row:
    """Times of all ranks; longest operators of the first."""
    first = ranks[0]
    phases = list[Row]()
    for name, phase in first.phases.items():
        all_ranks = [each.phases[name] for each in ranks if name in each.phases]
        longest = {"kernels": phase.kernels, "operators": phase.operators}
        row: Row = {
            "name": name,
            "peak_gib": number(max(each.peak_bytes or 0 for each in all_ranks) / 2**30),
        }
        row |= {
            time: [number(vars(each)[time]) for each in all_ranks]
            for time in ("seconds", "computing", "waiting")
        }
        row["parts"] = {part: number(seconds) for part, seconds in phase.parts.items()}
        shown = {
            kind: [[own, number(s), calls] for own, s, calls in rows]
            for kind, rows in longest.items()
        }
        row["longest"] = {kind: rows for kind, rows in shown.items() if rows}
        phases.append(row)
    return {
        "step": first.step,
        "device": first.device,
        "rank": first.rank,
        "ranks": len(ranks),
        "phases": phases,
    }
