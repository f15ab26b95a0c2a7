"""Plants bugs drawn at random, one after the other, and records which test of `make test` notices each.

    python -m tests.mutants.sweep FILE --packages rl rollout --count 150 --seed 1 [--seconds S] [--soak]

FILE (.jsonl) gets a line for each bug, and FILE.md the table. Run again, it goes on after the lines
that are there; a line of another tree or seed is an error. Tests that can reach the changed file
(tools/reach.py) run from near to far until one fails, at most S recorded seconds of them (default
300). --soak: what no test noticed runs the soak tests that reach it. A bug that changes no result
gets "equivalent": "why" in its line by hand; the table leaves it out of the share that is caught.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.operators import Change, changes
from tests.mutants.run import CAUGHT, QUICK_MARKS, ROOT, cause, copy_tree, run_tests
from tools.check import DURATIONS, UNKNOWN, reached

PACKAGE = "src/dovetail"
OWN = "tests/mutants/"  # notices that a line changed that it changes itself
SOAK = "soak and not gpu"
PATIENCE = 10.0  # times the recorded seconds, on a busy machine; then a bug hangs, which is noticed
LEAST = 300.0  # seconds
Record = dict[str, Any]


def copied(tree: Path) -> None:
    """The sources as they are now, whatever changes here, with a git of their own, which tests ask."""
    copy_tree(tree)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)


def candidates(tree: Path, packages: Sequence[str]) -> list[tuple[str, Change]]:
    """Every change of every file of the packages, in one order."""
    folders = [tree / PACKAGE / package for package in packages]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [
        (path.relative_to(tree).as_posix(), change)
        for path in paths
        for change in changes(path.read_text(encoding="utf-8"))
    ]


def drawn(tree: Path, packages: Sequence[str], count: int, seed: int) -> list[tuple[str, Change]]:
    """So many different ones, the same for the same tree and seed."""
    return random.Random(seed).sample(candidates(tree, packages), count)


def described(tree: Path, path: str, change: Change) -> Record:
    return {
        "path": path,
        "line": change.line,
        "operator": change.operator,
        "old": change.old,
        "new": change.new,
        "start": change.start,
        "source": hashlib.sha256((tree / path).read_bytes()).hexdigest()[:12],
    }


def tests_of(path: str, seconds: float) -> tuple[list[str], float]:
    """Test files that reach a file of the working directory, near ones first, and their seconds.

    They take at most `seconds` together, but for the first.
    """
    durations: Mapping[str, float] = json.loads(DURATIONS.read_text())
    steps = {test: n for test, n in reached([path]).items() if not test.startswith(OWN)}
    order = sorted(steps, key=lambda test: (steps[test], durations.get(test, UNKNOWN), test))
    chosen = list[str]()
    spent = 0.0
    for test in order:
        cost = durations.get(test, UNKNOWN)
        if not chosen or spent + cost <= seconds:
            chosen.append(test)
            spent += cost
    return chosen, spent


def plant(tree: Path, path: str, text: str) -> None:
    """Write a source, and forget its bytecode: two writes of a second may look like one."""
    file = tree / path
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def verdict(tree: Path, tests: Sequence[str], marks: str, limit: float) -> Record:
    """The first test that fails, and what it found; empty where all pass."""
    try:
        code, text = run_tests(tree, tests, marks, limit)
    except subprocess.TimeoutExpired:
        return {"test": tests[0], "found": f"did not end within {limit:.0f} s"}
    if code in (0, 5):  # 5: no test has the marks
        return {}
    failures = CAUGHT.findall(text)
    return {"test": failures[0] if failures else tests[0], "found": cause(text)}


def examined(tree: Path, path: str, change: Change, seconds: float, marks: str) -> Record:
    """Plant one change in the copy, run its tests, and take it back.

    A file that fails without the change, too, notices nothing: the others run again without it.
    """
    began = time.monotonic()
    source = (tree / path).read_text(encoding="utf-8")
    tests, spent = tests_of(path, seconds)
    limit = max(LEAST, PATIENCE * spent)
    record: Record = {"files": len(tests)}
    while tests:
        plant(tree, path, change.apply(source))
        try:
            found = verdict(tree, tests, marks, limit)
        finally:
            plant(tree, path, source)
        file = found.get("test", "").partition("::")[0]
        if not found or not verdict(tree, [file], marks, limit):
            record |= found
            break
        record.setdefault("broken", []).append(found["test"])
        tests = [test for test in tests if test != file]
    return {**record, "seconds": round(time.monotonic() - began)}


def read(file: Path) -> list[Record]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, records: Sequence[Record]) -> None:
    """Both files anew, whole."""
    lines = [json.dumps(record) + "\n" for record in records]
    part = file.with_suffix(".part")
    part.write_text("".join(lines))
    part.replace(file)
    file.with_suffix(".md").write_text(table(records))


def table(records: Sequence[Record]) -> str:
    """Markdown: a row for each bug, and the share that is caught."""
    counted = [record for record in records if "equivalent" not in record]
    quick = [record for record in counted if record.get("test")]
    whole = [record for record in counted if record.get("test") or record.get("soak")]
    same = len(records) - len(counted)
    lines = [
        f"{len(quick)} of {len(counted)} caught by `make test`, {len(whole)} with `make soak`; "
        f"{same} of {len(records)} drawn change no result.",
        "",
        "| where | operator | bug | noticed by | seconds |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        soak = record.get("soak")
        noticed = record.get("test") or (f"soak: {soak}" if soak else "**nobody**")
        if "equivalent" in record:
            noticed = f"equivalent: {record['equivalent']}"
        bug = f"`{_short(record['old'])}` to `{_short(record['new'])}`"
        where = f"{record['path'].removeprefix(PACKAGE + '/')}:{record['line']}"
        cells = (where, record["operator"], bug, noticed.removeprefix("tests/"), record["seconds"])
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")[:70]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="where the records go (.jsonl)")
    parser.add_argument("--packages", nargs="+", required=True, help="packages of dovetail")
    parser.add_argument("--count", type=int, required=True, help="how many bugs to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of tests for each (default 300)"
    )
    parser.add_argument("--soak", action="store_true", help="soak tests for what nobody noticed")
    args = parser.parse_args()
    os.nice(19)
    file = args.file.resolve()
    records = read(file)
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        tree = Path(folder)
        copied(tree)
        os.chdir(tree)  # where tools.check looks
        bugs = drawn(tree, args.packages, args.count, args.seed)
        for record, bug in zip(records, bugs, strict=False):
            told = described(tree, *bug)
            if any(record[key] != value for key, value in told.items()):
                parser.error(f"{file} is of another tree, seed or list of packages")
        for path, change in bugs[len(records) :]:
            record = described(tree, path, change)
            record |= examined(tree, path, change, args.seconds, QUICK_MARKS)
            records.append(record)
            write(file, records)
            sys.stdout.write(table([record]).splitlines()[-1] + "\n")
            sys.stdout.flush()
        for record, (path, change) in zip(records, bugs, strict=False):
            known = {"test", "soak", "equivalent"} & record.keys()
            if args.soak and not known:
                found = examined(tree, path, change, args.seconds, SOAK)
                record["soak"] = found.get("test", "")
                write(file, records)
        os.chdir(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
