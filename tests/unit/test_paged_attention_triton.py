"""Attention to a paged cache by triton's interpreter, where triton is installed; tests/gpu/test_sampler.py runs it on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.tolerances import OP_BF16, OP_FP32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_equal_the_reference() -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one."""
    command, env = [sys.executable, "-m", "tests.unit.decode_rows"], {**os.environ, "TRITON_INTERPRET": "1"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    assert len(found) == 14
    for case, error in found.items():
        assert error <= (OP_FP32 if "float32" in case else OP_BF16), case


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_compile_and_fit() -> None:
    """Hopper, and cards with less than half of its shared memory."""
    command = [sys.executable, "-m", "tests.unit.decode_compiled"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 14
    for case, (code, shared, room) in found.items():
        assert code and shared <= room, f"{case}: {shared} bytes of {room}"
