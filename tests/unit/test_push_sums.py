"""Sums of weights: their definition, their copies, and what they find."""

import importlib
import json
import random

import pytest
import torch

from dovetail.inference_servers.checksums import add_words, checksums_of
from dovetail.kernels.splitmix import FIRST, MASK, SECOND, STEP
from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.push_sums import DTYPES, SIZES, tensor
from tests.helpers.vllm_stand_in import PLUGIN


def spelled_out(data: bytes) -> str:
    """The definition by whole numbers."""
    total = len(data)
    for i in range(0, len(data), 8):
        x = int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") ^ (i // 8 * STEP & MASK)
        x = (x ^ x >> 30) * FIRST & MASK
        x = (x ^ x >> 27) * SECOND & MASK
        total += x ^ x >> 31
    return f"{total & MASK:016x}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_all_definitions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    plugin = importlib.import_module("dovetail_vllm.sums")
    tensors = [tensor(size, dtype) for size in SIZES for dtype in DTYPES]
    tensors += [
        torch.tensor(2.5),
        tensor(60, torch.bfloat16).view(6, 10).t(),
        tensor(99, torch.int8)[3:],
    ]
    expected = [spelled_out(bytes_of(one)) for one in tensors]
    assert checksums_of(tensors) == expected
    assert plugin.checksums_of(tensors) == expected


def test_the_kernel_has_the_definition_s_bits() -> None:
    pytest.importorskip("triton")
    for got, expected in json.loads(
        output_of(template, "tests.helpers.sum_words", TRITON_INTERPRET="1")
    ):
        assert got == expected


def test_words_may_come_in_any_order() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (1000,))
    whole, parts = torch.tensor(0), torch.tensor(0)
    add_words(words, whole, 5)
    for start in (700, 0, 300):
        stop = min(start + (400 if start == 300 else 300), 1000)
        add_words(words[start:stop], parts, 5 + start)
    assert whole == parts


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_any_change_shows(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    data = bytes_of(tensor(1003, dtype))
    right = checksums_of([torch.frombuffer(bytearray(data), dtype=torch.uint8)])
    for attempt in range(100):
        changed, i, j = bytearray(data), draw.randrange(len(data)), draw.randrange(len(data))
        if attempt % 3 == 0 and data[i] != data[j]:
            changed[i], changed[j] = data[j], data[i]
        elif attempt % 3 == 1:
            changed[i] ^= 0x80  # signs and nothing else, which sums of products may miss
            changed[j - j % 8 + i % 8 if j // 8 != i // 8 else (i + 8) % len(data)] ^= 0x80
        else:
            changed[i] ^= 1 << draw.randrange(8)
        assert (
            changed != data
            and checksums_of([torch.frombuffer(changed, dtype=torch.uint8)]) != right
        )
    for other in (data[8:] + data[:8], data + b"\0", data[:-1], bytes(len(data))):
        assert checksums_of([torch.frombuffer(bytearray(other), dtype=torch.uint8)]) != right
