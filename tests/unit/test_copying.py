"""What FSDP2 hands over to be summed, in pieces from where gradients lie: the tensor that it would have made of them."""

from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce_scatter_copy_in

from dovetail.engine.copying import Gradients, PeerScatter, cut, parts_of, together

SIZE = 4
SHAPES = ((8, 3), (9, 2), (3,), (1, 5, 2), (4,), (6, 7))  # by 4 ranks: evenly, unevenly, with none for the last


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(shape).to(dtype) for shape in SHAPES]
    found[-1] = torch.randn(7, 6).to(dtype).T  # as a foreign layer may leave one
    return found


def laid_in(memory: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    foreach_reduce_scatter_copy_in(gradients(dtype), memory, SIZE)
    return memory


def numel() -> int:
    return SIZE * sum(-(-shape[0] // SIZE) * int(torch.Size(shape[1:]).numel()) for shape in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_stands_for_the_tensor(dtype: torch.dtype) -> None:
    expected = laid_in(torch.empty(numel()), dtype)
    laid = laid_in(Gradients.like((numel(),), torch.float32, torch.device("cpu")), dtype)
    assert torch.equal(together(laid, SIZE), expected)
    assert torch.equal(together(expected, SIZE), expected)


@pytest.mark.parametrize("most", [1, 5, 16, 1000])
def test_pieces_are_what_each_rank_would_get(most: int) -> None:
    expected = laid_in(torch.empty(numel())).view(SIZE, -1)
    laid = laid_in(Gradients.like((numel(),), torch.float32, torch.device("cpu")))
    share = numel() // SIZE
    for part, mine, plain in zip(parts_of(laid, SIZE), expected, parts_of(expected.flatten(), SIZE), strict=True):
        found = torch.zeros(share)
        for start in range(0, share, most):
            stop = min(start + most, share)
            for at, numbers in cut(part, start, stop):
                found[start:stop][at : at + len(numbers)] = numbers
        assert torch.equal(found, mine)  # what no piece has is zero there
        ((at, numbers),) = cut(plain, 3, 7)
        assert at == 0 and torch.equal(numbers, mine[3:7])


def test_an_error_leaves_no_gradients() -> None:
    """Between what FSDP2 asks for first and the sum; the next ones are taken from where they lie again."""
    scatter = PeerScatter(Mock())
    first = laid_in(scatter.allocate((numel(),), dtype=torch.float32, device=torch.device("cpu")))
    kept = ref(first.each[0])  # type: ignore[attr-defined]
    assert type(scatter.allocate((numel(),), dtype=torch.float32, device=torch.device("cpu"))) is Tensor
    del first
    assert kept() is None
    assert isinstance(scatter.allocate((numel(),), dtype=torch.float32, device=torch.device("cpu")), Gradients)


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="copy_engines"):
        Gradients.like((4,), torch.float32, torch.device("cpu")).mul_(2.0)
