"""Operations of the kernel registry: the reference against plain formulas, see tests/gpu for other devices."""

import pytest
import torch

from dovetail.kernels.reference_experts import grouped_mm
from tests.helpers.expert_rows import GROUPS, experts
from tests.helpers.tolerances import OP_FP64, assert_close


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_grouped_mm(sizes: tuple[int, ...]) -> None:
    x, weight, offsets = experts(sizes, torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    expected = torch.einsum("tk,tkn->tn", x, weight[owner])
    up = torch.randn_like(expected)
    actual = grouped_mm(x, weight, offsets)
    assert_close(actual, expected, OP_FP64)
    ours = torch.autograd.grad(actual, (x, weight), up)
    for a, b, what in zip(
        ours, torch.autograd.grad(expected, (x, weight), up), ("x", "weight"), strict=True
    ):
        assert_close(a, b, OP_FP64, what)
    assert not ours[1][torch.tensor(sizes) == 0].any()
