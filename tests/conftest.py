"""Session-wide set-up of the tests: ends the worker processes, and keeps this process on one thread."""

from collections.abc import Iterator

import pytest
import torch

from tests.harness import close_workers


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_workers()
