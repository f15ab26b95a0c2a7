"""Models that several tests only read."""

from pathlib import Path

import pytest

from tests.helpers.program import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")
