"""The head's row kernels by triton's interpreter, where triton is installed; tests/gpu/test_head.py runs them on a GPU."""

import importlib.util
import json

import pytest

from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import OP_BF16, OP_FP32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_row_kernels_equal_the_reference() -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one."""
    found = interpreted("tests.helpers.head_rows")
    assert len(found) == 11
    for case, errors in found.items():
        for what, error in errors.items():
            assert error <= (OP_BF16 if "bfloat16" in what else OP_FP32), (case, what)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_what_a_product_leaves_by_tile_joins_to_whole_rows() -> None:
    found = interpreted("tests.helpers.head_products")
    assert len(found) == 12
    for case, errors in found.items():
        for what, error in errors.items():
            assert error <= (OP_BF16 if "bfloat16" in what else OP_FP32), (case, what)


def interpreted(module: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(
        output_of(template, module, TRITON_INTERPRET="1")
    )
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_row_kernels_compile_for_hopper() -> None:
    """Without a GPU: the interpreter takes Python that the compiler refuses."""
    found = json.loads(output_of(template, "tests.helpers.head_compiled"))
    pairs = {f"{name}{kind}" for name in ("_pair_sums", "_pair_grad") for kind in ("", 1, 2)}
    assert set(found) == {"_row_stats", "_row_grad", "_combine", *pairs} and all(found.values())
