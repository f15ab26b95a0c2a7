"""The kernels of blocks and experts by triton's interpreter, where triton is installed; tests/gpu run them on a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.tolerances import MODEL_FP32, OP_BF16

check = pytest.importorskip("tests.unit.block_rows", reason="needs triton").check
ROUNDINGS = 4  # norm, gain, angle, sum: the most on one way


def test_kernels_equal_the_reference() -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one.

    The interpreter cuts bfloat16 off where a GPU rounds it, which is one step more at each rounding. It rounds float16 as a
    GPU does: there, what has no sums has equal bits.
    """
    command, env = [sys.executable, "-m", "tests.unit.block_rows"], {**os.environ, "TRITON_INTERPRET": "1"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    check(found, ROUNDINGS * OP_BF16, rounds=False)


def test_kernels_compile_for_hopper() -> None:
    """Without a GPU: the interpreter takes Python that the compiler refuses. Rows are read and written 16 bytes at a time."""
    command = [sys.executable, "-m", "tests.unit.block_compiled"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 29
    for name, code, widest in found:
        assert code > 0, name
        expected = {"_count": 64, "_place": 64, "_sample": 64, "_write": 64, "_invert": 32, "_pick": 32}.get(name, 128)
        assert widest == expected, (name, widest)


@pytest.mark.soak
def test_whole_models() -> None:
    """Norms of queries and keys, experts, latent attention; recomputed in full, but for attention, and not at all."""
    command, env = [sys.executable, "-m", "tests.unit.block_models"], {**os.environ, "TRITON_INTERPRET": "1"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    assert len(found) == 4
    assert all(error <= MODEL_FP32 for error in found.values()), found
