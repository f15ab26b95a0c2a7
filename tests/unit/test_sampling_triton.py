"""Draws by triton's interpreter, where triton is installed; tests/gpu/test_sampler.py has them on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.tolerances import OP_FP32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_draws_are_those_of_torch() -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one."""
    command, env = [sys.executable, "-m", "tests.unit.draw_rows"], {**os.environ, "TRITON_INTERPRET": "1"}
    found, odd = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    assert len(found) == 41
    for case, (others, error) in found.items():
        assert others == 0, case
        assert error <= OP_FP32, case
    assert all(odd.values()), odd
