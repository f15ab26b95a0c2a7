"""Session-wide set-up of the tests: ends the worker processes, keeps this process on one thread, and draws no test anew."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.harness import close_workers

# The same examples in every session, and no verdict on how long one takes: a busy machine may stop at any moment.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_workers()
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _no_second_look() -> None:
    """What is imported stays: no collection of garbage goes through it again, which takes half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=40, help="random models and layouts that the fuzz target tries")
    parser.addoption("--draw-seed", type=int, default=0, help="the first of its seeds")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many draws of the fuzz target were refused and why, and how near the others came to one rank."""
    passed = terminalreporter.stats.get("passed", [])
    outcomes = [value for report in passed for name, value in report.user_properties if name == "outcome"]
    errors = [value for value in outcomes if isinstance(value, float)]
    refusals = [value for value in outcomes if isinstance(value, str)]
    if outcomes:
        worst = f", worst error {max(errors):.1e}" if errors else ""
        terminalreporter.line(f"draws: {len(errors)} equal one rank{worst}; {len(refusals)} are refused")
    for value in sorted(set(refusals)):
        terminalreporter.line(f"  {value}")
