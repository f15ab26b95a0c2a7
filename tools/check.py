"""Lints what has changed and runs the tests that can reach it, cheapest first, within a budget: `python -m tools.check`.

    python -m tools.check [--base REF] [--seconds S] [--jobs N] [--dry-run]

Changed is what differs from REF (default: HEAD, or where nothing does the point at which the branch left main), with files that
git does not know. Always run: test files that have changed, and those of tests/unit that import a changed file. The
others follow, near ones (at most two imports away) and those that take no time before far ones, cheap ones before long
ones, until S recorded seconds (tests/durations.json) are used. What is left out is printed, with its seconds: `make test`
runs all.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.reach import Graph, dependents, graph
from tools.style_check import check_source, check_text

DURATIONS = Path("tests/durations.json")
UNKNOWN = 5.0  # seconds of a test file that has no record
EVERYTHING = (
    "pyproject.toml",
    "tests/conftest.py",
    "tests/helpers/session.py",
    "tests/helpers/harness.py",
    "tests/helpers/template.py",
    "tests/helpers/forked.py",
)  # what all tests depend on
UNIT = "tests/unit/"
CHEAP = 0.3  # seconds of a test file that runs before long ones, however far it is
NEAR = 2  # imports between a test and a changed file
APART = ("tests/gpu/",)  # never run here


class Plan(NamedTuple):
    """Test files in the order they run, and those that can reach a change but are left out: near ones and far ones."""

    run: tuple[str, ...]
    near: tuple[str, ...]
    far: tuple[str, ...]


def plan(steps: Mapping[str, int], durations: Mapping[str, float], budget: float) -> Plan:
    """`steps`: test file -> imports between it and a changed file (0: changed itself)."""

    def cost(path: str) -> float:
        return durations.get(path, UNKNOWN)

    always = [path for path, n in steps.items() if n == 0 or (n == 1 and path.startswith(UNIT))]
    chosen = sorted(always, key=cost)
    spent = sum(map(cost, chosen))
    others = sorted(
        set(steps) - set(always),
        key=lambda path: (steps[path] > NEAR and cost(path) > CHEAP, cost(path), path),
    )
    for path in others:
        if spent + cost(path) <= budget:
            chosen.append(path)
            spent += cost(path)
    left = [path for path in others if path not in chosen]
    near = tuple(path for path in left if steps[path] <= NEAR)
    return Plan(tuple(chosen), near, tuple(path for path in left if path not in near))


def is_test(path: str) -> bool:
    name = Path(path).name
    return name.startswith("test_") and name.endswith(".py") and not path.startswith(APART)


def git(*words: str) -> list[str]:
    listed = subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.split("\0") if line]


def changed_files(base: str | None) -> tuple[list[str], str]:
    """Paths that differ from `base`, deleted ones included, and the name of what they differ from."""
    untracked = git("ls-files", "-z", "--others", "--exclude-standard")
    found = [*git("diff", "-z", "--name-only", "--no-renames", base or "HEAD"), *untracked]
    if found or base:
        return sorted({*found}), base or "HEAD"
    parent = git("merge-base", "HEAD", "main")[0].strip()
    return git("diff", "-z", "--name-only", "--no-renames", parent), f"main ({parent[:9]})"


@functools.cache
def repository(deleted: frozenset[str]) -> tuple[Graph, frozenset[str]]:
    """Which files use which, and those of Python, `deleted` ones included."""
    tracked = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    sources = {
        path: Path(path).read_text()
        for path in tracked
        if path.endswith(".py") and Path(path).exists()
    }
    sources |= dict.fromkeys(deleted, "")
    return graph(sources, [path for path in tracked if not path.endswith(".py")]), frozenset(
        sources
    )


def reached(changed: Iterable[str]) -> dict[str, int]:
    """Every test file that can reach a changed file -> steps between them."""
    changed = [*changed]
    deleted = frozenset(
        path for path in changed if path.endswith(".py") and not Path(path).exists()
    )
    edges, sources = repository(deleted)
    steps = dependents(edges, changed)
    if not {*changed}.isdisjoint(EVERYTHING):
        steps = {path: steps.get(path, len(sources)) for path in sources}
    return {path: n for path, n in steps.items() if is_test(path) and Path(path).exists()}


def lint(changed: Sequence[str]) -> list[list[str]]:
    """The commands that lint changed files. Import directions are checked where the package has changed."""
    files = [path for path in changed if path.endswith(".py") and Path(path).exists()]
    python = [sys.executable, "-m"]
    commands = (
        [[*python, "ruff", "check", *files], [*python, "ruff", "format", "--check", *files]]
        if files
        else []
    )
    if any(path.startswith("src/") for path in files):
        commands.append([str(Path(sys.executable).with_name("lint-imports")), "--no-cache"])
    return commands


def style(changed: Iterable[str]) -> list[str]:
    """What tools/style_check.py finds in changed files."""
    found = []
    for path in (path for path in changed if Path(path).is_file()):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            *check_text(path, text),
            *(check_source(path, text) if path.endswith(".py") else ()),
        ]
    return [str(violation) for violation in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--base", help="what to compare with (default: HEAD, or main where nothing differs from it)"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="recorded seconds of tests to run (default: 20)"
    )
    parser.add_argument("--jobs", default="2", help="test files that run at a time (default: 2)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    args = parser.parse_args()
    began = time.monotonic()
    durations: dict[str, float] = json.loads(DURATIONS.read_text())
    changed, base = changed_files(args.base)
    chosen, near, far = plan(reached(changed), durations, args.seconds)
    total = sum(durations.get(path, UNKNOWN) for path in chosen)
    print(
        f"check: {len(changed)} files differ from {base}; {len(chosen)} test files of {total:.0f} s"
    )
    failed = 0
    if not args.dry_run:
        problems = style(changed)
        print("\n".join(problems), end="\n" * bool(problems))
        failed = int(bool(problems))
        for command in lint(changed):
            failed |= int(bool(subprocess.run(command, check=False).returncode))
        if chosen:
            pytest = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                "not gpu and not soak",
                "-n",
                args.jobs,
            ]
            environment = {
                name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
            }
            command = [*pytest, "--dist", "loadfile", "--no-loadscope-reorder", *chosen]
            failed |= int(
                subprocess.run(command, check=False, env=environment).returncode not in (0, 5)
            )
    else:
        print("\n".join(f"  {durations.get(path, UNKNOWN):6.1f} s  {path}" for path in chosen))
    print_left(near, far, durations)
    print(f"check: {'FAILED' if failed else 'passed'} in {time.monotonic() - began:.0f} s")
    return failed


def print_left(near: Sequence[str], far: Sequence[str], durations: Mapping[str, float]) -> None:
    """What could notice the change and did not run: each near test file, and the others by folder."""
    print(
        "left out: types (make lint), soak and GPU tests"
        + ("; of the tests that reach the change:" if near or far else "")
    )
    for path in near:
        print(f"  {durations.get(path, UNKNOWN):6.1f} s  {path}")
    for folder in sorted({str(Path(path).parent) for path in far}):
        inside = [durations.get(path, UNKNOWN) for path in far if str(Path(path).parent) == folder]
        print(
            f"  {sum(inside):6.1f} s  {len(inside)} files of {folder}, more than {NEAR} imports away"
        )


if __name__ == "__main__":
    sys.exit(main())
