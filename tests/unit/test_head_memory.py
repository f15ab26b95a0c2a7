"""Head and loss need the memory of one chunk of logits, whatever the number of tokens."""

import json

import pytest

from tests.helpers.forked import output_of
from tests.helpers.harness import template

SMALL = 1024  # bytes: the sums of two more chunks


def measured(tokens: int, vocab: int) -> dict[str, int]:
    found: dict[str, int] = json.loads(
        output_of(template, "tests.helpers.head_memory", tokens, vocab)
    )
    return found


@pytest.mark.parametrize(
    ("tokens", "vocab"), [(3072, 38016), pytest.param(8192, 152064, marks=pytest.mark.soak)]
)
def test_peak_is_that_of_one_chunk(tokens: int, vocab: int) -> None:
    few, many = measured(2048, vocab), measured(tokens, vocab)
    limit = 3 * 1024 * vocab * 4 // 2  # 1.5 chunks of 1024 tokens in float32
    for found in (few, many):
        allowed = limit + found["dx"] + found["dw"]
        assert found["tensors"] <= allowed, found
        assert found["resident"] <= allowed, found
        assert found["tensors"] >= 1024 * vocab * 4, f"a chunk of logits was not seen: {found}"
    growth = many["tensors"] - few["tensors"] - (many["dx"] - few["dx"])
    assert growth <= SMALL, f"grew by {growth} bytes more than dX with the tokens"
