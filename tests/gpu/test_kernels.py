"""Kernels of a CUDA device against the reference, values and gradients."""

import pytest
import torch

from dovetail.kernels import cuda, reference_experts
from tests.helpers.expert_rows import GROUPS, experts
from tests.helpers.tolerances import OP_BF16, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_grouped_mm(sizes: tuple[int, ...]) -> None:
    x, weight, offsets = experts(sizes, torch.bfloat16, "cuda")
    up = torch.randn(len(x), 8, device="cuda", dtype=torch.bfloat16)
    torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # what memory holds that nobody wrote
    actual, expected = (
        op(x, weight, offsets) for op in (cuda.grouped_mm, reference_experts.grouped_mm)
    )
    assert_close(actual, expected, OP_BF16)
    ours, theirs = (torch.autograd.grad(y, (x, weight), up) for y in (actual, expected))
    for a, b, what in zip(ours, theirs, ("x", "weight"), strict=True):
        assert_close(a, b, OP_BF16, what)
    assert not ours[1][torch.tensor(sizes, device="cuda") == 0].any()
