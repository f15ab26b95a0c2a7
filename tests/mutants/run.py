"""The mutation test of the proof harness: plants each bug of this folder in a copy of the tree, and says which test notices.

    python -m tests.mutants.run [--write] [--clean] [--jobs N] [--first TEST ...] [NAME ...]

NAME is a name in a TOML file of this folder, or its beginning; default: all. Each runs, in a process group of its own, the test
that its row names and, if that passes, what `make test` runs of numbers, the smallest layouts first. --write: RESULTS.md.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from tests.helpers.matrix import name_of
from tests.helpers.matrix_checks import QUICK
from tests.helpers.tolerances import EXACT, GRAD_RATIO_FP32, SUM_ORDER

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROOMS = ("tests/distributed", "tests/parity", "tests/unit")  # run in this order, after the matrix
MATRIX = "tests/distributed/test_matrix.py"
SYNCS = "tests/fault/test_syncs.py"  # of a room whose other tests take long
ALIKE = "test_micro_batches_of_one_shape_are_told_apart"
QUICK_MARKS = "not soak and not gpu"
OPTIONS = ("-x", "-q", "-k", "not sleep", "-p", "no:cacheprovider")  # no clocks
LIMIT = (
    1800.0  # seconds for one mutant; a rank that hangs ends long before, by the harness's own limit
)
CAUGHT = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
CAUSE = re.compile(r"^E +(\S.*)", re.MULTILINE)
FIGURE = re.compile(r"(\w+)=([^ ,)]+)")
LATE = re.compile(r"did not (start|finish) within")
BOUNDS = {"ratio": GRAD_RATIO_FP32, "stray": EXACT}


@dataclass(frozen=True)
class Mutant:
    """A planted bug: one changed statement of the package. test: the one that is known to notice it."""

    name: str
    kind: str
    path: str
    test: str
    old: str
    new: str

    @property
    def file(self) -> str:
        """Returns the path in the repository; `path` is that in `dovetail`, or one of the tools."""
        of_tools = self.path.startswith("dovetail_tools/")
        return f"src/{self.path}" if of_tools else f"src/dovetail/{self.path}"


@dataclass(frozen=True)
class Failure:
    """The first test that failed, and what it found: the figures beyond their bounds, or an error."""

    test: str
    found: str


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. `failure` is None where all tests passed."""

    mutant: Mutant
    failure: Failure | None
    seconds: float

    @property
    def row(self) -> str:
        caught, found = "**nobody**", ""
        if self.failure:
            caught, found = (
                f"`{self.failure.test.removeprefix('tests/')}`",
                self.failure.found.replace("|", "/"),
            )
        return (
            f"| {self.mutant.name} | {self.mutant.kind} | {caught} | {found} | {self.seconds:.0f} |"
        )


def mutants() -> list[Mutant]:
    """Every planted bug of this folder's TOML files."""
    tables = [tomllib.loads(file.read_text())["mutant"] for file in sorted(HERE.glob("*.toml"))]
    return [Mutant(**fields) for table in tables for fields in table]


def copy_tree(target: Path) -> None:
    """What git tracks, or would track, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def plant(mutant: Mutant, tree: Path) -> None:
    """Change the file in a copy. Raises unless the line is there exactly once."""
    file = tree / mutant.file
    before = file.read_text()
    assert before.count(mutant.old + "\n") == 1, (
        f"{mutant.name}: {mutant.path} has changed: plant the same bug in the new line"
    )
    file.write_text(before.replace(mutant.old + "\n", mutant.new + "\n"))


def selection() -> list[str]:
    """The matrix of `make test` from few ranks to many, then the rooms' other tests."""
    layouts = sorted((layout for layout, *_ in QUICK), key=lambda layout: layout.num_ranks)
    cases = [f"{MATRIX}::test_equals_one_rank[{name_of(layout)}]" for layout in layouts]
    files = [
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in sorted((ROOT / room).glob("test_*.py"))
    ]
    first, last = f"{MATRIX}::test_a_step_is_adamws_and_decays_matrices_alone", f"{MATRIX}::{ALIKE}"
    return [first, *cases, last, *(f for f in files if f != MATRIX), SYNCS]


def first_failure(tree: Path, tests: Sequence[str]) -> Failure | None:
    """The first test that fails there, or None. Ranks that are late get a second chance: a busy machine is no bug."""
    code, text = run_tests(tree, tests)
    if LATE.search(text):
        code, text = run_tests(tree, tests)
    failures = CAUGHT.findall(text)
    if code not in (0, 1) or (code == 1) != bool(failures) or "did not start within" in text:
        raise RuntimeError(f"pytest ended with {code}, which tells nothing:\n{text[-4000:]}")
    return Failure(failures[0], cause(text)) if failures else None


def run_tests(
    tree: Path, tests: Sequence[str], marks: str = QUICK_MARKS, limit: float = LIMIT
) -> tuple[int, str]:
    """pytest's exit code and output, up to the first failure.

    Leaves none of its processes, whatever they wait for. TimeoutExpired: it did not end within `limit` seconds.
    """
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-m", marks, *tests]
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command,
            cwd=tree,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = run.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        output.seek(0)
        return code, output.read()


def cause(text: str) -> str:
    """What a failed test found: which of the matrix's figures are too large, or the error that ended it."""
    lines = CAUSE.findall(text)
    figures = next((line for line in lines if "Figures(" in line), "")
    wrong = [
        name
        for name, value in FIGURE.findall(figures)
        if not float(value) <= BOUNDS.get(name, SUM_ORDER)
    ]
    if wrong:
        return ", ".join(wrong)
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Failed|Exception)\b", line)]
    late = [line for line in lines if LATE.search(line)]
    return re.sub(r"/\S+/", "", (late or errors[-1:] or lines[:1] or ["?"])[0])[
        :90
    ]  # without a folder of this run


def outcome(mutant: Mutant, tests: Sequence[str]) -> Outcome:
    """One mutant in a fresh copy: its own test, and the others where that passes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        plant(mutant, Path(folder))
        failure = first_failure(Path(folder), [mutant.test]) or first_failure(Path(folder), tests)
        return Outcome(mutant, failure, time.monotonic() - start)


def report(outcomes: Sequence[Outcome]) -> str:
    """RESULTS.md."""
    missed = [found.mutant.name for found in outcomes if not found.failure]
    versions = f"Python {python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    lines = [
        "# Mutation test of the proof harness",
        "",
        f"{len(outcomes) - len(missed)} of {len(outcomes)} planted bugs are caught by the tests of `make test`; uncaught: "
        f"{', '.join(missed) or 'none'}.",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {versions}; {sum(found.seconds for found in outcomes) / 60:.0f} minutes on a CPU. "
        "Written by `python -m tests.mutants.run --write`.",
        "",
        "| mutant | kind | the first test that fails | what it finds | seconds |",
        "|---|---|---|---|---|",
        *(found.row for found in outcomes),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names, or their beginnings")
    parser.add_argument("--write", action="store_true", help="write RESULTS.md")
    parser.add_argument(
        "--first", nargs="+", default=[], metavar="TEST", help="tests that run before the others"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many run at a time, each in a copy of its own"
    )
    parser.add_argument("--clean", action="store_true", help="first run everything without any bug")
    args = parser.parse_args()
    chosen = [m for m in mutants() if not args.names or m.name.startswith(tuple(args.names))]
    tests = [*args.first, *(test for test in selection() if test not in args.first)]
    if args.clean:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            copy_tree(Path(folder))
            if failure := first_failure(Path(folder), tests):
                sys.stdout.write(f"without any bug, {failure.test} fails: {failure.found}\n")
                return 1
    outcomes = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(partial(outcome, tests=tests), chosen):
            outcomes.append(found)
            sys.stdout.write(found.row + "\n")
            sys.stdout.flush()
    if args.write:
        (HERE / "RESULTS.md").write_text(report(outcomes))
    return int(any(not found.failure for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
