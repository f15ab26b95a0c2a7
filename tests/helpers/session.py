"""Set-up of a process that runs tests: ends the ranks' processes, keeps this process on one thread, and draws no test anew."""

import gc
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.helpers.harness import close_workers, fork_template

# The same examples in every session, and no verdict on how long one takes: a busy machine may stop at any moment.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_sessionstart(session: pytest.Session) -> None:
    # Else it parses all of our modules, for constants to draw: seconds, and other examples after each change of them.
    if hasattr(providers, "is_local_module_file"):  # of new releases
        mock.patch.object(providers, "is_local_module_file", return_value=False).start()
    if hasattr(session.config, "workerinput"):
        fork_template()
        os.environ.pop(
            "TORCH_CPP_LOG_LEVEL", None
        )  # programs that are executed write all that users see


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
        pytest.fail(
            "a test of this file leaves a process group in the process of pytest; see bench.models.one_rank"
        )
