"""Session-wide set-up of the tests: ends the worker processes, keeps this process on one thread, and draws no test anew."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.harness import close_workers

# The same examples in every session, and no verdict on how long one takes: a busy machine may stop at any moment.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# Files that take longest, before all others: workers that take a file at a time then end together.
LONGEST = (
    "distributed/test_matrix.py",
    "parity/test_transformers.py",
    "distributed/test_training_pipelines.py",
    "distributed/test_replay.py",
    "distributed/test_sampler.py",
    "hf/test_vision.py",
    "commands/test_program.py",
    "distributed/test_resume.py",
    "distributed/test_moe_layouts.py",
    "commands/test_pipelines.py",
    "distributed/test_weights.py",
    "unit/test_launch.py",
    "fault/test_crashes.py",
    "commands/test_train.py",
    "parity/test_moe.py",
    "hf/test_parity.py",
    "distributed/test_turns.py",
    "distributed/test_training_layouts.py",
    "distributed/test_round_trips.py",
    "unit/test_norm_triton.py",
    "hf/test_edge_cases.py",
    "distributed/test_training.py",
    "unit/test_sampler.py",
    "fault/test_foreign_code.py",
    "unit/test_no_waiting.py",
    "golden/test_golden.py",
    "fault/test_stops.py",
    "distributed/test_executor.py",
    "distributed/test_layouts.py",
    "unit/test_head_memory.py",
    "fault/test_deaths.py",
    "distributed/test_train_command.py",
    "golden/test_parts.py",
    "distributed/test_reshard.py",
    "unit/test_paged_attention_triton.py",
    "hf/test_media_training.py",
    "fault/test_signals.py",
    "distributed/test_communication.py",
    "unit/test_recompute.py",
    "distributed/test_step_start.py",
    "distributed/test_fuzz_layouts.py",
    "distributed/test_weights_memory.py",
    "fault/test_rewards.py",
    "parity/test_half_precision.py",
    "unit/test_recipe_changes.py",
    "fault/test_damage.py",
    "unit/test_logprob_triton.py",
    "distributed/test_value_heads.py",
    "fault/test_fuzz.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several share the work; one alone keeps the order that it was given."""
    if not hasattr(config, "workerinput"):
        return
    places = {f"tests/{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


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


@pytest.fixture(scope="module", autouse=True)
def _no_group_stays() -> Iterator[None]:
    """No file leaves this process in a process group: which file comes next is for the schedule to say."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a test of this file leaves a process group in the process of pytest; see bench.models.one_rank")


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
