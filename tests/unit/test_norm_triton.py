"""The kernels of blocks and experts by triton's interpreter, where triton is installed; tests/gpu run them on a GPU."""

import json

import pytest

from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import MODEL_FP32, OP_BF16

check = pytest.importorskip("tests.helpers.block_rows", reason="needs triton").check
ROUNDINGS = 4  # norm, gain, angle, sum: the most on one way


@pytest.mark.parametrize(
    "dtypes",
    [
        (),
        *(pytest.param(x, marks=pytest.mark.soak) for x in (("float32", "float16"), ("bfloat16",))),
    ],
    ids=lambda names: "-".join(names) or "in turn",
)
def test_kernels_equal_the_reference(dtypes: tuple[str, ...]) -> None:
    """In a process of its own: interpreted kernels and compiled ones cannot live in one.

    The interpreter cuts bfloat16 off where a GPU rounds it, which is one step more at each rounding. It rounds float16 as a
    GPU does: there, what has no sums has equal bits.
    """
    found = json.loads(
        output_of(
            template,
            "tests.helpers.block_rows",
            *(f"torch.{name}" for name in dtypes),
            TRITON_INTERPRET="1",
        )
    )
    assert all(any(f" torch.{name}:" in case for case in found) for name in dtypes)
    check(found, ROUNDINGS * OP_BF16, rounds=False, in_turn=not dtypes)


def test_kernels_compile_for_hopper() -> None:
    """Without a GPU: the interpreter takes Python that the compiler refuses. Rows are read and written 16 bytes at a time."""
    found = json.loads(output_of(template, "tests.helpers.block_compiled"))
    assert len(found) == 30
    for name, code, widest in found:
        assert code > 0, name
        expected = {
            "_count": 64,
            "_place": 64,
            "_add_words": 64,
            "_sample": 64,
            "_write": 64,
            "_invert": 32,
            "_pick": 32,
        }.get(name, 128)
        assert widest == expected, (name, widest)


@pytest.mark.soak
def test_whole_models() -> None:
    """Norms of queries and keys, experts, latent attention; recomputed in full, but for attention, and not at all."""
    found = json.loads(output_of(template, "tests.helpers.block_models", TRITON_INTERPRET="1"))
    assert len(found) == 4
    assert all(error <= MODEL_FP32 for error in found.values()), found
