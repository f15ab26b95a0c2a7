"""One HTML file from the runs' data, drawn by report.js."""

import base64
import hashlib
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, raise_disk_problem
from dovetail.records.runs import Row, Run, number, read_runs, text_of
from dovetail_tools.report.profiles import read_profiles
from dovetail_tools.report.samples import choose, script_json

Columns = dict[str, list[float | None]]  # by name
MAX_POINTS = 600  # of a curve
MAX_SAMPLES = 800
SAMPLE_BYTES = 2_500_000  # of all runs
MAX_SERIES = 200
MAX_EVENTS = 500  # of a run
MAX_CHARACTERS = 500  # of a value of an event
GROUPS = (  # title, pattern of names; the first match counts
    ("Evaluation", r"^eval"),
    ("Reward", r"^rewards?\b|^reward_|^equal_groups|^score"),
    ("Lengths", r"length|truncated|stop_fraction"),
    ("Memory", r"memory|_gib$"),
    ("Speed", r"per_second|seconds|mfu|utilization|^tokens$|^samples$"),
    ("Experts", r"expert|rout|^replayed"),
    ("Learning", r"loss|grad_norm|^lr$|entropy|kl|clip|mismatch|value|ratio|advantage"),
    ("Other", ""),
)
ORDER = ("Reward", "Evaluation", "Learning", "Lengths", "Speed", "Memory", "Experts", "Other")
BANDS = (  # the middle, the ends, and the legend; the first that is there counts
    ("mean", "p25", "p75", "quartiles of the samples"),
    ("p50", "p25", "p75", "quartiles of the samples"),
    ("mean", "min", "max", "least to most"),
    ("mean", "p10", "p90", "10 % to 90 %"),
    ("p50", "p10", "p90", "10 % to 90 %"),
    ("p50", "p5", "p95", "5 % to 95 %"),
)
FROM_ZERO = re.compile(  # counts and shares
    r"fraction|share|errors|rewards_none|solved|equal_groups|mfu|utilization|pass@|^tokens$|^samples$"
)
FIELD = re.compile(rb"\{\{(\w+)\}\}")  # of report.html
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 0))
HELP: Mapping[str, str] = {
    "reward_mean": "mean reward of the step's samples",
    "equal_groups": "share of prompts whose samples all have the same reward, so that they teach nothing",
    "reward_errors": "samples whose reward failed",
    "rewards_none": "samples that are dropped, since their reward was None",
    "eval_reward_mean": "mean reward of greedy completions of held-out prompts",
    "eval_solved": "share of held-out prompts that are solved",
    "eval_loss": "loss of held-out rows",
    "grad_norm": "norm of the gradient before clipping",
    "entropy_mean": "mean entropy of the policy over its tokens",
    "kl_mean": "KL to the reference, or to the sampling policy without one",
    "clip_fraction": "share of tokens whose ratio is clipped",
    "lr": "learning rate",
    "stop_fraction": "share of completions that ended by themselves, not at the length limit",
    "mfu": "share of the device's peak FLOP/s",
    "tokens": "tokens trained in the step",
}


def write_report(paths: Sequence[Path], out: Path, reload: float = 0) -> bool:
    """Writes the page. Returns whether all runs are finished. reload: seconds, 0 for never."""
    runs = read_runs(paths)
    finished = all(run.finished for run in runs)
    html = render(page_data(runs, 0 if finished else reload))
    fresh = out.with_name(f".{out.name}.part")
    try:
        fresh.write_bytes(html)
        os.replace(fresh, out)
    except OSError as error:
        with suppress(OSError):  # of a read-only disk
            fresh.unlink()
        raise_disk_problem(error, out)
        raise ConfigError(
            f"--out {out} cannot be written: {error.strerror}; give the path of a file"
        ) from error
    return finished


def render(data: Mapping[str, Any]) -> bytes:
    """Returns HTML that loads nothing from outside, where only our script may run."""
    folder = Path(__file__).parent
    style = (folder / "report.css").read_bytes()
    script = (folder / "report.js").read_bytes()
    digest = base64.b64encode(hashlib.sha256(script).digest())
    names = ", ".join(run["name"] for run in data["runs"])
    page = (folder / "report.html").read_bytes()
    fields = {
        b"DIGEST": digest,
        b"TITLE": escape(names).encode(errors="backslashreplace"),
        b"STYLE": style,
        b"DATA": script_json(data),
        b"SCRIPT": script,
    }
    return FIELD.sub(lambda match: fields[match[1]], page)


def page_data(runs: Sequence[Run], reload: float = 0) -> dict[str, Any]:
    shown = [_run_data(run) for run in runs]
    names = list(dict.fromkeys(name for run in shown for name in run["series"]))
    groups: dict[str, list[str]] = {title: [] for title in ORDER}
    for name in names:
        groups[_group_of(name)].append(name)
    samples = []
    for i, run in enumerate(runs):
        rows = choose(run.path, MAX_SAMPLES // len(runs), SAMPLE_BYTES // len(runs))
        samples += [{"run": i, **row} for row in rows]
    return {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "reload": reload,
        "runs": shown,
        "groups": [[title, members] for title, members in groups.items() if members],
        "zero": [name for name in names if FROM_ZERO.search(name)],
        "joined": groups["Evaluation"],
        "help": {name: text for name, text in HELP.items() if name in names},
        "samples": samples,
        "config": _config(runs),
    }


def _group_of(name: str) -> str:
    return next(title for title, pattern in GROUPS if re.search(pattern, name))


def _config(runs: Sequence[Run]) -> list[list[Any]]:
    """Returns a row for each key: the key, and the value and the default of each run."""
    rows: dict[str, list[Any]] = {}
    for run in runs:
        for key in (*run.config, *run.defaults):
            rows[key] = [key]
    for key, row in rows.items():
        for run in runs:
            sources = (run.config, run.defaults)
            row.append([text_of(source[key]) if key in source else None for source in sources])
    return list(rows.values())


def _run_data(run: Run) -> dict[str, Any]:
    steps, columns, phases = _measured(run.rows)
    seconds = columns.get("step_seconds", [])
    tokens = columns.get("tokens", [])
    each = _bucket(len(steps))
    hours = [number(total / 3600) for total in _sums(seconds, len(steps))]
    return {
        "name": run.name,
        "path": str(run.path.resolve()),
        "state": _state(run),
        "facts": _facts(run, columns),
        "x": {
            "step": _ends(steps, each),
            "hours": _ends(hours, each),
            "tokens": _ends(_sums(tokens, len(steps)), each),
        },
        "series": _series(columns, each),
        "phases": {name: _thin(values, values, values)["v"] for name, values in phases.items()},
        "step_seconds": _thin(seconds, seconds, seconds)["v"] if phases else [],
        "profiles": read_profiles(run.path),
        "events": [_short(event) for event in _events(run)],
        "log": run.log,
    }


def _short(event: Row) -> dict[str, str]:
    return {key: text_of(value)[:MAX_CHARACTERS] for key, value in event.items()}


def _measured(rows: Sequence[Row]) -> tuple[list[int], Columns, Columns]:
    """Returns steps, values by name, and seconds by phase; an evaluation before training is step 0."""
    steps = [row["step"] for row in rows]
    columns: Columns = {}
    phases: Columns = {}
    before: dict[str, float | None] = {}
    for name, values in _columns(rows).items():
        if name.endswith("_before"):
            known = [value for value in values if value is not None]
            before[name.removesuffix("_before")] = known[0]
        elif name.startswith("seconds/"):
            phases[name.removeprefix("seconds/")] = values
        else:
            columns[name] = values
    if before:
        steps = [0, *steps]
        for name in before:
            columns.setdefault(name, [None] * len(rows))
        columns = {name: [before.get(name), *values] for name, values in columns.items()}
        phases = {name: [None, *values] for name, values in phases.items()}
    return steps, columns, phases


def _columns(rows: Sequence[Row]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    columns: Columns = {}
    for name in names:
        values = [number(row.get(name)) for row in rows]
        is_known = any(value is not None for value in values)
        if is_known and name not in ("step", "timestamp", "time"):
            columns[name] = values
    return columns


def _series(columns: Columns, each: int) -> dict[str, Any]:
    """Returns the points and the band of each curve. each: steps of a point."""
    bands, hidden = _bands(columns)
    legend = f"least to most of {each} steps" if each > 1 else ""
    series: dict[str, Any] = {}
    for name in [name for name in columns if name not in hidden][:MAX_SERIES]:
        low, high, text = bands.get(name, (name, name, legend))
        series[name] = _thin(columns[name], columns[low], columns[high])
        if text:
            series[name]["band"] = text
    return series


def _bands(columns: Mapping[str, object]) -> tuple[dict[str, tuple[str, str, str]], set[str]]:
    """Returns low end, high end and legend of each name with a band, and all such ends."""
    bands: dict[str, tuple[str, str, str]] = {}
    ends: set[str] = set()
    for name in columns:
        middle = re.split(r"[_/]", name)[-1]
        stem = name[: len(name) - len(middle)]
        for centre, low, high, legend in BANDS:
            if middle == centre and stem + low in columns and stem + high in columns:
                bands.setdefault(name, (stem + low, stem + high, legend))
                ends |= {stem + low, stem + high}
    return bands, ends


def _bucket(count: int) -> int:
    """Returns the rows of a point."""
    return max(1, -(-count // MAX_POINTS))


def _thin(
    values: Sequence[float | None], low: Sequence[float | None], high: Sequence[float | None]
) -> dict[str, Any]:
    each = _bucket(len(values))

    def points(of: Sequence[float | None], how: Any) -> list[float | None]:
        reduced: list[float | None] = []
        for start in range(0, len(of), each):
            known = [value for value in of[start : start + each] if value is not None]
            reduced.append(number(how(known)) if known else None)
        return reduced

    if each == 1 and low is values:
        return {"v": list(values)}
    return {"v": points(values, statistics.fmean), "lo": points(low, min), "hi": points(high, max)}


def _ends(values: Sequence[float | None], each: int) -> list[float | None]:
    return [values[min(i + each, len(values)) - 1] for i in range(0, len(values), each)]


def _sums(values: Sequence[float | None], count: int) -> list[float]:
    if not values:
        return [0.0] * count
    return list(accumulate(value or 0.0 for value in values))


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    if not run.rows:
        return "no step yet"
    age = max(0.0, time.time() - (run.path / "metrics.jsonl").stat().st_mtime)
    unit, size = next((unit, size) for unit, size in UNITS if age >= size)
    return f"not finished, last step {age / (size or 1):.0f} {unit} ago"


def _facts(run: Run, columns: Mapping[str, Sequence[float | None]]) -> dict[str, str]:
    config = run.config
    last = run.rows[-1]["step"] if run.rows else 0
    known: dict[str, list[float]] = {}
    for name, values in columns.items():
        known[name] = [value for value in values if value is not None]
    facts: dict[str, Any] = {
        "algorithm": config.get("algorithm.name"),
        "model": config.get("model.path"),
        "layout": _layout(run),
        "steps": f"{last} of {config.get('trainer.steps', '?')}",
        "ended early": _ended_early(run, last),
    }
    names = ["reward_mean", "eval_reward_mean", "eval_solved", "eval_loss"]
    if "reward_mean" not in columns:
        names.append("loss")
    for name in names:
        values = known.get(name, [])
        if values:
            facts[name] = f"{values[0]:.4g}"
        if len(values) > 1:
            facts[name] += f" \u2192 {values[-1]:.4g}"
    if "step_seconds" in known:
        facts["median step"] = f"{statistics.median(known['step_seconds']):.3g} s"
    if "tokens_per_second" in known:
        facts["median tokens/s"] = f"{statistics.median(known['tokens_per_second']):,.0f}"
    if "peak_memory_gib" in known:
        facts["peak memory"] = f"{max(known['peak_memory_gib']):.3g} GiB"
    counts = {
        "updates skipped": sum(bool(row.get("skipped")) for row in run.rows),
        "rewards failed": int(sum(known.get("reward_errors", ()))),
        "samples without a reward": int(sum(known.get("rewards_none", ()))),
        "steps with equal rewards only": sum(row.get("equal_groups") == 1 for row in run.rows),
    }
    facts |= {name: str(count) for name, count in counts.items() if count}
    return {name: str(value) for name, value in facts.items() if value is not None}


def _layout(run: Run) -> str:
    """Returns the degrees that are not 1, with dp as the run has it."""
    degrees = {}
    for axis in ("tp", "pp", "cp", "dp", "ep"):
        degrees[axis] = run.config.get(f"layout.{axis}", 1)
    if degrees["dp"] == "auto" and run.ranks is not None:
        degrees["dp"] = run.ranks // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    shown = [f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1]
    return ",".join(shown) or "one rank"


def _ended_early(run: Run, last: int) -> str | None:
    """Returns why the run took no step after step `last`; None if it took all, or goes on."""
    for event in run.events:
        if event.get("kind") == "ended_early" and event.get("step") == last:
            return text_of(event.get("cause"))
    return None


def _events(run: Run) -> list[Row]:
    steps = []
    for row in run.rows:
        for key, kind in (("fault", "update skipped"), ("reward_error", "reward failed")):
            if row.get(key):
                steps.append({"kind": kind, "step": row["step"], "cause": row[key]})
    read = [{"kind": "not read", "cause": problem} for problem in run.problems]
    return [*read, *run.events[-MAX_EVENTS:], *steps[-MAX_EVENTS:]]
