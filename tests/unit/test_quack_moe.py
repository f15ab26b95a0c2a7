"""A mixture whose products gather and gate, by triton's interpreter and plain products; tests/gpu/test_quack.py: on a GPU."""

import importlib.util
import json

import pytest

from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import OP_BF16

CHAIN = 2 * OP_BF16  # two products one after the other, each operand and result rounded


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_mixture_equals_the_reference() -> None:
    """Values, and gradients of tokens, weights and both of every expert's matrices; nowhere entries cost and learn nothing."""
    found = json.loads(output_of(template, "tests.helpers.quack_rows", TRITON_INTERPRET="1"))
    assert len(found) == 5
    for case, errors in found.items():
        assert errors.pop("of nowhere") == 0, case
        for what, error in errors.items():
            assert error <= CHAIN, (case, what)
