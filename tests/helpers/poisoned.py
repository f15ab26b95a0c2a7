"""Prompts that share pages."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)  # which fills it, unless told otherwise
    try:
        assert torch.zeros(1).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
