"""Gradients of stretches of keys laid down where they leave from: against autograd's own of slices, on poisoned memory."""

from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor

from dovetail.kernels.reference import sum_deterministic
from dovetail.nn.context_parallel import scatter_kv_grads
from tests.helpers.poisoned import poisoned

SIZE, GROUPS, CHANNELS = 6, 2, 3  # tokens of a chunk, KV heads and their channels


def plain(grads: list[Tensor], stretches: list[slice], lines: int) -> Tensor:
    """By autograd: the gradients of all tokens' keys and values, then in the order of lines."""
    found = []
    for kind in range(2):
        x = torch.zeros(2 * lines * SIZE, GROUPS, CHANNELS, dtype=torch.float64, requires_grad=True)
        whole = torch.autograd.grad([x[stretch] for stretch in stretches], x, grads[kind::2])[0]
        chunks = whole.chunk(2 * lines)
        found.append(torch.stack([torch.cat((chunks[i], chunks[-1 - i])) for i in range(lines)]))
    return torch.stack(found, dim=1)


def stretches_of(lines: int, chance: Random) -> Iterator[list[slice]]:
    """One in the other, beside each other, overlapping, of all, of one token, one alone, three; and some at random."""
    total = 2 * lines * SIZE
    ends: list[list[tuple[int, int]]] = [
        [(0, SIZE), (0, total)],
        [(0, total), (SIZE, 2 * SIZE)],
        [(1, 3), (total - 4, total)],
        [(0, SIZE + 1), (SIZE + 1, total)],
        [(2, SIZE + 2), (5, total - 1)],
        [(0, total)],
        [(0, 1), (0, total - SIZE), (total - 1, total)],
    ]
    for _ in range(20):
        pairs = [sorted(chance.sample(range(total + 1), 2)) for _ in range(2)]
        ends.append([(first, last) for first, last in pairs])
    for some in ends:
        yield [slice(*pair) for pair in some]


@pytest.mark.parametrize("lines", [1, 2, 3, 4])
def test_stretches_are_laid_down_as_autograd_adds_them(lines: int) -> None:
    draw, chance = torch.Generator().manual_seed(lines), Random(lines)
    for stretches in stretches_of(lines, chance):
        lengths = [stretch.stop - stretch.start for stretch in stretches for _ in range(2)]
        grads = [
            torch.randn(n, GROUPS, CHANNELS, generator=draw, dtype=torch.float64) for n in lengths
        ]
        with poisoned():
            found = scatter_kv_grads(grads, stretches, 2 * SIZE, lines)
        assert found.is_contiguous()
        assert torch.equal(found, plain(grads, stretches, lines)), stretches


def test_gradients_need_not_be_dense() -> None:
    """Attention may return views of something wider, with its dims turned."""
    draw, stretches = torch.Generator().manual_seed(0), [slice(0, 9), slice(4, 24)]
    wide = [
        torch.randn(CHANNELS + 1, GROUPS, 20, generator=draw, dtype=torch.float64) for _ in range(4)
    ]
    lengths = [stretch.stop - stretch.start for stretch in stretches for _ in range(2)]
    grads = [x.permute(2, 1, 0)[:n, :, 1:] for x, n in zip(wide, lengths, strict=True)]
    with poisoned():
        assert torch.equal(
            scatter_kv_grads(grads, stretches, 2 * SIZE, 2), plain(grads, stretches, 2)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_in_order_and_rounded_once(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = (
        torch.randn(8, 5, 7, generator=draw) * torch.randn(8, 5, 7, generator=draw).mul(8).exp()
    ).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    assert torch.equal(sum_deterministic(parts), total.to(dtype))
    backwards = sum_deterministic(parts.flip(0))
    assert not torch.equal(total, backwards.to(wide)), "the order of these parts does not matter"
