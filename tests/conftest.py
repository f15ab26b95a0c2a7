"""Options of the tests, their order and their records; tests/helpers/session.py has what the processes that run them set up."""

import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

DURATIONS = (
    Path(__file__).parent / "durations.json"
)  # seconds by test file; --record-durations writes it
SOAK_RESULTS = Path(__file__).parent / "soak-results.md"
UNKNOWN = 5.0  # seconds of a file that has no record
# What libraries read on import: one thread each (pyarrow's jemalloc and the check for GPUs have one more, unless by NVML),
# and no report by torch of a connection that another rank closed.
AT_IMPORT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}
SELDOM = (
    50_000,
    20,
    20,
)  # collections of garbage: Python's own 700 cost a tenth of all seconds, most of them in imports
IN_MEMORY, ROOM = (
    Path("/dev/shm"),
    4e9,
)  # bytes that temporary files may need there: most tests' are removed as they pass


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One piece of all tests; and the longest files first where workers take a file at a time: they then end together."""
    if piece := config.getoption("--piece"):
        number, count = map(int, piece.split("/"))
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
    if hasattr(config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], UNKNOWN))


def pytest_configure(config: pytest.Config) -> None:
    """What runs tests imports torch; the process that deals them out to others does not."""
    os.environ.update(AT_IMPORT)
    gc.set_threshold(*SELDOM)
    if (
        "TMPDIR" not in os.environ
        and IN_MEMORY.is_dir()
        and shutil.disk_usage(IN_MEMORY).free > ROOM
    ):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(
            importlib.import_module("tests.helpers.session"), "tests.helpers.session"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draws", type=int, default=40, help="random models and layouts that the fuzz target tries"
    )
    parser.addoption("--draw-seed", type=int, default=0, help="the first of its seeds")
    parser.addoption(
        "--piece",
        metavar="I/N",
        help="run the I-th of N pieces of the tests, cut by a hash of their names",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write the seconds of each file to {DURATIONS.name}",
    )
    parser.addoption("--record-soak", action="store_true", help=f"add a row to {SOAK_RESULTS.name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many draws of the fuzz target were refused and why, and how near the others came to one rank."""
    passed = terminalreporter.stats.get("passed", [])
    outcomes = [
        value for report in passed for name, value in report.user_properties if name == "outcome"
    ]
    errors = [value for value in outcomes if isinstance(value, float)]
    refusals = [value for value in outcomes if isinstance(value, str)]
    if outcomes:
        worst = f", worst error {max(errors):.1e}" if errors else ""
        terminalreporter.line(
            f"draws: {len(errors)} equal one rank{worst}; {len(refusals)} are refused"
        )
    for value in sorted(set(refusals)):
        terminalreporter.line(f"  {value}")
    if terminalreporter.config.getoption("--record-durations"):
        _record_durations(terminalreporter.stats)
    if terminalreporter.config.getoption("--record-soak") and not hasattr(
        terminalreporter.config, "workerinput"
    ):
        _record_soak(terminalreporter)


def _record_durations(stats: dict[str, list[Any]]) -> None:
    """Seconds of set-up, call and teardown by file; files that did not run keep theirs, those that are gone lose them."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in (
        each
        for reports in stats.values()
        for each in reports
        if isinstance(each, pytest.TestReport)
    ):
        seconds[report.nodeid.partition("::")[0]] += report.duration
    known = {
        **json.loads(DURATIONS.read_text()),
        **{path: round(value, 1) for path, value in seconds.items()},
    }
    kept = {path: known[path] for path in sorted(known) if (DURATIONS.parents[1] / path).exists()}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], capture_output=True, text=True, check=True, cwd=SOAK_RESULTS.parent
    )
    return done.stdout.strip()


def _record_soak(reporter: Any) -> None:
    """A row of this run: date, commit, piece, counts and minutes."""
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--untracked-files=no", "--", f":!{SOAK_RESULTS.name}"):
        commit += "-dirty"
    counts = [
        len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")
    ]
    minutes = (time.time() - reporter._session_start.time) / 60
    piece = reporter.config.getoption("--piece") or "1/1"
    row = [f"{datetime.now(UTC):%Y-%m-%d}", commit, piece, *map(str, counts), f"{minutes:.0f}"]
    with SOAK_RESULTS.open("a") as file:
        file.write(f"| {' | '.join(row)} |\n")


@pytest.fixture(autouse=True)
def drop_modules_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test imports from a temporary folder: the next `mine.py` is another file."""
    before = set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and file.startswith(temporary):
            del sys.modules[name]
