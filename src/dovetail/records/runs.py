"""Files of a run's directory; what is missing or torn is left out."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.recipe.schema import make_recipe
from dovetail.recipe.yaml import flat, read_mapping

Row = dict[str, Any]
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LOG = "console.log"
RANK_LOG = "logs/rank-0.log"
STARTED = re.compile(r"^\S+: rank 0 of (\d+) on ", re.MULTILINE)
STEP = re.compile(r"step_(\d+)")
REQUIRED: Mapping[str, Any] = {
    "model": {"path": "M"},
    "data": {"train": "D"},
    "run_dir": "R",
}  # keys without default
ROLLOUT = "rollout"  # kind of training samples
MAX_HEAD = 3000
MAX_TAIL = 1000  # characters of a text that are kept
LOG_BYTES = 16_000


@dataclass(frozen=True)
class Run:
    """config, defaults: by dotted key. ranks: of the last start. problems: unreadable files."""

    path: Path
    name: str
    rows: Sequence[Row]
    events: Sequence[Row]
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    log: str
    ranks: int | None
    problems: Sequence[str]

    @property
    def finished(self) -> bool:
        return (self.path / "hf").exists()


@dataclass(frozen=True)
class SampleFile:
    path: Path
    step: int
    kind: str


def check_runs(paths: Sequence[Path]) -> None:
    for path in paths:
        if _is_run(path):
            continue
        why = "there is no such directory"
        inside = []
        if path.is_dir():
            why = f"it has neither {CONFIG} nor {METRICS}"
            inside = sorted(str(child) for child in path.iterdir() if _is_run(child))
        hint = "give the run_dir of a recipe"
        if inside:
            hint = f"the runs in it: {' '.join(inside[:10])}"
        raise ConfigError(f"{path} is not the directory of a run: {why}; {hint}")


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in (CONFIG, METRICS))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    check_runs(paths)
    names = [path.resolve().name for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        is_unique = names.count(name) == 1
        runs.append(_read_run(path, name if is_unique else str(path)))
    return runs


def _read_run(path: Path, name: str) -> Run:
    config: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    problems = []
    try:
        config = flat(read_mapping(path / CONFIG))
        least = {**REQUIRED, "algorithm": {"name": config.get("algorithm.name", "grpo")}}
        defaults = flat(make_recipe(least).model_dump(mode="json", by_alias=True))
        defaults = {key: value for key, value in defaults.items() if key not in flat(REQUIRED)}
    except ConfigError as error:  # of another release, or cut by a kill
        problems.append(str(error))
    rows = [row for row in read_rows(path / METRICS) if isinstance(row.get("step"), int)]
    log = _tail(path / LOG)
    events = list(read_rows(path / EVENTS))
    ranks = _ranks(path / RANK_LOG)
    return Run(path, name, rows, events, config, defaults, log, ranks, problems)


def _ranks(path: Path) -> int | None:
    """How many ranks the last start had, by the log of the first; None: unknown."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    starts = STARTED.findall(text)
    return int(starts[-1]) if starts else None


def read_rows(path: Path) -> Iterator[Row]:
    """Skips torn lines; numbers that are not finite are None."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line, parse_constant=lambda _: None)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def _tail(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


def sample_files(run: Path) -> list[SampleFile]:
    files = []
    for folder, kind in (("rollouts", ROLLOUT), ("eval", "eval")):
        for path in (run / folder).glob("**/*.jsonl"):
            name = str(path.relative_to(run / folder).with_suffix(""))
            found = STEP.search(name)
            step = int(found[1]) if found else 0
            name = STEP.sub("", name).strip("./_- ")
            files.append(SampleFile(path, step, f"{kind} {name}".strip()))
    return sorted(files, key=lambda file: (file.step, file.kind, str(file.path)))


def read_samples(file: SampleFile, most_bytes: float = math.inf) -> Iterator[Row]:
    """most_bytes: of the file, about."""
    spent = 0
    for row in read_rows(file.path):
        if "completion" not in row:
            continue
        inner = row.get("rewards")
        parts = inner if isinstance(inner, dict) else {}
        for key, value in row.items():
            if key.startswith("reward/"):
                parts[key.removeprefix("reward/")] = value
        tokens = row.get("token_ids")
        yield {
            "step": file.step,
            "kind": file.kind,
            "id": _short(row["id"]) if row.get("id") is not None else "",
            "sample": row.get("sample"),
            "prompt": _short(row.get("prompt", "")),
            "completion": _short(row["completion"]),
            "answer": "" if row.get("answer") is None else _short(row["answer"]),
            "reward": number(row.get("reward")),
            "parts": {_short(key): number(value) for key, value in parts.items()},
            "finish": _short(row.get("finish") or ""),
            "tokens": len(tokens) if isinstance(tokens, list) else None,
        }
        spent += len(str(row.get("prompt"))) + len(str(row["completion"]))
        spent += 20 * len(tokens or ())
        if spent > most_bytes:
            return


def number(value: object) -> float | None:
    """None if not finite; rounded to six digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(f"{value:.6g}") if math.isfinite(value) else None
    except OverflowError:  # an int larger than any float
        return None


def text_of(value: object) -> str:
    """Messages by role; other values as JSON."""
    if isinstance(value, str):
        return value
    items = value if isinstance(value, list) else []
    if items and all(isinstance(item, dict) and "content" in item for item in items):
        lines = [f"[{item.get('role', '?')}] {_content(item['content'])}" for item in items]
        return "\n".join(lines)
    return json.dumps(value, ensure_ascii=False)


def _content(content: object) -> str:
    parts = content if isinstance(content, list) else [content]
    words = []
    for part in parts:
        if isinstance(part, dict):
            kind = part.get("type", "part")
            words.append(str(part.get("text", f"<{kind}>")))
        else:
            words.append(text_of(part))
    return " ".join(words)


def _short(value: object) -> str:
    text = text_of(value)
    left_out = len(text) - MAX_HEAD - MAX_TAIL
    if left_out <= 0:
        return text
    return f"{text[:MAX_HEAD]}\n[... {left_out:,} characters left out ...]\n{text[-MAX_TAIL:]}"
