"""Samples of a run in the terminal."""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from dovetail.records.runs import ROLLOUT, Row, read_samples, sample_files


def reward_of(row: Row) -> float:
    return -1e300 if row["reward"] is None else row["reward"]


def select(run: Path, step: int | None, prompt: str | None, search: str | None) -> Iterator[Row]:
    """step None: the last, or all with a prompt or search."""
    files = sample_files(run)
    if step is None and not (prompt or search):
        step = max(
            (file.step for file in files if file.kind == ROLLOUT),
            default=files[-1].step if files else 0,
        )
    words = (search or "").lower()
    for file in files:
        if step not in (None, file.step):
            continue
        for row in read_samples(file):
            text = f"{row['prompt']}\n{row['completion']}\n{row['answer']}".lower()
            if prompt in (None, row["id"]) and words in text:
                yield row


def sort(rows: Iterable[Row], by: str | None, limit: int) -> list[Row]:
    """by: best or worst reward first."""
    if by is None:
        return list(itertools.islice(rows, limit))
    rewarded = (row for row in rows if row["reward"] is not None)
    choose = heapq.nlargest if by == "best" else heapq.nsmallest
    return choose(limit, rewarded, key=reward_of)


def describe(row: Row) -> str:
    """Returns a sample as text, with control characters escaped."""
    facts = [f"step {row['step']}"]
    if row["kind"] != ROLLOUT:
        facts.append(row["kind"])
    if row["id"]:
        facts.append(f"prompt {row['id']}")
    if row["sample"] is not None:
        facts.append(f"sample {row['sample']}")
    facts.append(f"reward {_shown(row['reward'])}")
    facts += [f"{name} {_shown(value)}" for name, value in row["parts"].items()]
    if row["tokens"] is not None:
        facts.append(f"{row['tokens']} tokens")
    facts.append(row["finish"])
    texts = [
        f"  {name:<11}{_indented(row[name])}"
        for name in ("prompt", "answer", "completion")
        if row[name]
    ]
    return "\n".join([_indented("  ".join(filter(None, facts))), *texts]) + "\n\n"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _indented(text: str) -> str:
    escaped = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(escaped).replace("\n", "\n" + " " * 13)
