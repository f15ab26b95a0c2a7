"""Models that several tests only read; and nothing that a failed test has started goes on, for its runs are endless."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import programs
from tests.helpers.program import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def no_program_outlives_its_test() -> Iterator[None]:
    yield
    for pid in programs():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
