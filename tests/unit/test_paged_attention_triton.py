"""Attention to a paged cache by triton's interpreter, where triton is installed; tests/gpu/test_sampler.py runs it on a GPU."""

import importlib.util
import json

import pytest

from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import OP_BF16, OP_FP32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_equal_the_reference() -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one."""
    found = json.loads(output_of(template, "tests.helpers.decode_rows", TRITON_INTERPRET="1"))
    assert len(found) == 8
    for case, error in found.items():
        assert error <= (OP_FP32 if "float32" in case else OP_BF16), case


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_compile_and_fit() -> None:
    """Hopper, and cards with less than half of its shared memory."""
    found = json.loads(output_of(template, "tests.helpers.decode_compiled"))
    assert len(found) == 14
    for case, (code, shared, room) in found.items():
        assert code and shared <= room, f"{case}: {shared} bytes of {room}"
