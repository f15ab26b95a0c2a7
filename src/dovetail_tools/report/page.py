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

MAX_POINTS = 600  # of a curve
MAX_SAMPLES = 800
SAMPLE_BYTES = 2_500_000  # of all runs
MAX_SERIES = 200
MAX_EVENTS = 500  # of a run
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
    """Whether all runs are finished. reload: seconds, 0 for never."""
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
    """Loads nothing from outside; only our script may run."""
    style, script = (
        (Path(__file__).with_name(f"report.{kind}")).read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(", ".join(run["name"] for run in data["runs"])).encode(errors="backslashreplace")
    parts = (
        b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode(),
        b'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n',
        b"<title>"
        + title
        + b" - dovetail report</title>\n<style>\n"
        + style.encode()
        + b"</style>\n</head>\n<body>\n",
        b'<main id="page"><noscript>This report draws its curves by a script; please allow it.</noscript></main>\n',
        b'<script type="application/json" id="data">' + script_json(data) + b"</script>\n",
        b"<script>" + script.encode() + b"</script>\n</body>\n</html>\n",
    )
    return b"".join(parts)


def page_data(runs: Sequence[Run], reload: float = 0) -> dict[str, Any]:
    shown = [_run_data(run) for run in runs]
    names = list(dict.fromkeys(name for run in shown for name in run["series"]))
    groups: dict[str, list[str]] = {title: [] for title in ORDER}
    for name in names:
        groups[next(title for title, pattern in GROUPS if re.search(pattern, name))].append(name)
    keys = list(dict.fromkeys(key for run in runs for key in (*run.config, *run.defaults)))
    share = (MAX_SAMPLES // len(runs), SAMPLE_BYTES // len(runs))
    samples = [{"run": i, **row} for i, run in enumerate(runs) for row in choose(run.path, *share)]
    return {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "reload": reload,
        "runs": shown,
        "groups": [[title, members] for title, members in groups.items() if members],
        "zero": [name for name in names if FROM_ZERO.search(name)],
        "joined": groups["Evaluation"],
        "help": {name: text for name, text in HELP.items() if name in names},
        "samples": samples,
        "config": [
            [
                key,
                *([_config(source, key) for source in (run.config, run.defaults)] for run in runs),
            ]
            for key in keys
        ],
    }


def _config(source: Mapping[str, Any], key: str) -> str | None:
    return text_of(source[key]) if key in source else None


def _run_data(run: Run) -> dict[str, Any]:
    columns = _columns(run.rows)
    steps = [row["step"] for row in run.rows]
    known = {n: columns.pop(n) for n in list(columns) if n.endswith("_before")}
    before = {
        n.removesuffix("_before"): next(v for v in values if v is not None)
        for n, values in known.items()
    }
    phases = {
        name.removeprefix("seconds/"): columns.pop(name)
        for name in list(columns)
        if name.startswith("seconds/")
    }
    if before:  # the evaluation before training, at step 0
        steps = [0, *steps]
        columns |= {name: [None] * len(run.rows) for name in before if name not in columns}
        columns = {name: [before.get(name), *values] for name, values in columns.items()}
        phases = {name: [None, *values] for name, values in phases.items()}
    seconds, tokens = (columns.get(name, []) for name in ("step_seconds", "tokens"))
    series: dict[str, Any] = {}
    each = _bucket(len(steps))
    bands, hidden = _bands(columns)
    legend = f"least to most of {each} steps" if each > 1 else ""
    for name in [name for name in columns if name not in hidden][:MAX_SERIES]:
        low, high, text = bands.get(name, (name, name, legend))
        series[name] = _thin(columns[name], columns[low], columns[high])
        if text:
            series[name]["band"] = text
    return {
        "name": run.name,
        "path": str(run.path.resolve()),
        "state": _state(run),
        "facts": _facts(run, columns),
        "x": {
            "step": _ends(steps, each),
            "hours": _ends([number(total / 3600) for total in _sums(seconds, len(steps))], each),
            "tokens": _ends(_sums(tokens, len(steps)), each),
        },
        "series": series,
        "phases": {name: _thin(values, values, values)["v"] for name, values in phases.items()},
        "step_seconds": _thin(seconds, seconds, seconds)["v"] if phases else [],
        "profiles": read_profiles(run.path),
        "events": [
            {key: text_of(value)[:500] for key, value in event.items()} for event in _events(run)
        ],
        "log": run.log,
    }


def _columns(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(
        name for row in rows for name in row if name not in ("step", "timestamp", "time")
    )
    columns = {name: [number(row.get(name)) for row in rows] for name in names}
    return {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _bands(columns: Mapping[str, object]) -> tuple[dict[str, tuple[str, str, str]], set[str]]:
    """Low end, high end and legend of each name with a band; all names that are such ends."""
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
    """Rows per point."""
    return max(1, -(-count // MAX_POINTS))


def _thin(
    values: Sequence[float | None], low: Sequence[float | None], high: Sequence[float | None]
) -> dict[str, Any]:
    each = _bucket(len(values))

    def points(of: Sequence[float | None], how: Any) -> list[float | None]:
        known = ([x for x in of[i : i + each] if x is not None] for i in range(0, len(of), each))
        return [number(how(part)) if part else None for part in known]

    if each == 1 and low is values:
        return {"v": list(values)}
    return {"v": points(values, statistics.fmean), "lo": points(low, min), "hi": points(high, max)}


def _ends(values: Sequence[float | None], each: int) -> list[float | None]:
    return [values[min(i + each, len(values)) - 1] for i in range(0, len(values), each)]


def _sums(values: Sequence[float | None], count: int) -> list[float]:
    return list(accumulate((value or 0.0 for value in values), initial=0.0))[1:] or [0.0] * count


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
    facts = {"algorithm": config.get("algorithm.name"), "model": config.get("model.path")}
    degrees = {axis: config.get(f"layout.{axis}", 1) for axis in ("tp", "pp", "cp", "dp", "ep")}
    if degrees["dp"] == "auto" and run.ranks is not None:
        degrees["dp"] = run.ranks // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    layout = ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1)
    facts |= {
        "layout": layout or "one rank",
        "steps": f"{last} of {config.get('trainer.steps', '?')}",
    }
    facts["ended early"] = _ended_early(run, last)
    names = ["reward_mean", "eval_reward_mean", "eval_solved", "eval_loss"]
    for name in names if "reward_mean" in columns else [*names, "loss"]:
        known = [value for value in columns.get(name, ()) if value is not None]
        if known:
            facts[name] = f"{known[0]:.4g}" + (f" \u2192 {known[-1]:.4g}" if len(known) > 1 else "")
    medians = (
        ("step_seconds", "median step", "{:.3g} s"),
        ("tokens_per_second", "median tokens/s", "{:,.0f}"),
    )
    for name, text, how in medians:
        if known := [value for value in columns.get(name, ()) if value is not None]:
            facts[text] = how.format(statistics.median(known))
    if known := [value for value in columns.get("peak_memory_gib", ()) if value is not None]:
        facts["peak memory"] = f"{max(known):.3g} GiB"
    counts = {"updates skipped": sum(bool(row.get("skipped")) for row in run.rows)}
    counts["rewards failed"] = int(sum(value or 0 for value in columns.get("reward_errors", ())))
    counts["samples without a reward"] = int(
        sum(value or 0 for value in columns.get("rewards_none", ()))
    )
    counts["steps with equal rewards only"] = sum(row.get("equal_groups") == 1 for row in run.rows)
    facts |= {name: str(count) for name, count in counts.items() if count}
    return {name: str(value) for name, value in facts.items() if value is not None}


def _ended_early(run: Run, last: int) -> str | None:
    """Why the run took no step after step `last`; None if it took all, or goes on."""
    for event in run.events:
        if event.get("kind") == "ended_early" and event.get("step") == last:
            return text_of(event.get("cause"))
    return None


def _events(run: Run) -> list[Row]:
    steps = [
        {"kind": kind, "step": row["step"], "cause": row[key]}
        for row in run.rows
        for key, kind in (("fault", "update skipped"), ("reward_error", "reward failed"))
        if row.get(key)
    ]
    read = [{"kind": "not read", "cause": problem} for problem in run.problems]
    return [*read, *run.events[-MAX_EVENTS:], *steps[-MAX_EVENTS:]]
