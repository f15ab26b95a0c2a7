"""Head and loss need the memory of one chunk of logits, whatever the number of tokens."""

import json
import subprocess
import sys

import pytest

from tests.unit.head_memory import VOCAB

LIMIT = 3 * 1024 * VOCAB * 4 // 2  # 1.5 chunks of 1024 tokens in float32
SMALL = 1024  # bytes: the sums of two more chunks


def measured(tokens: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.unit.head_memory", str(tokens)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


@pytest.mark.parametrize("tokens", [3072, pytest.param(8192, marks=pytest.mark.soak)])
def test_peak_is_that_of_one_chunk(tokens: int) -> None:
    few, many = measured(2048), measured(tokens)
    for found in (few, many):
        allowed = LIMIT + found["dx"] + found["dw"]
        assert found["tensors"] <= allowed, found
        assert found["resident"] <= allowed, found
        assert found["tensors"] >= 1024 * VOCAB * 4, f"a chunk of logits was not seen: {found}"
    growth = many["tensors"] - few["tensors"] - (many["dx"] - few["dx"])
    assert growth <= SMALL, f"grew by {growth} bytes more than dX with the tokens"
