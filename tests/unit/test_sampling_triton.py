"""Draws by triton's interpreter, where triton is installed; tests/gpu/test_sampler.py has them on a GPU."""

import importlib.util
import json

import pytest

from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import OP_FP32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_draws_are_those_of_torch() -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one."""
    found, odd = json.loads(output_of(template, "tests.helpers.draw_rows", TRITON_INTERPRET="1"))
    assert len(found) == 33
    for case, (others, error) in found.items():
        assert others == 0, case
        assert error <= OP_FP32, case
    assert all(odd.values()), odd
