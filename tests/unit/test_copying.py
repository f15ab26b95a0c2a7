"""What FSDP2 hands over to be summed, in pieces from where gradients lie: the tensor that it would have made of them."""

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce_scatter_copy_in

from dovetail.engine.copying import Gradients, pieces_of, together

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
    for rank, mine in enumerate(expected):
        found = torch.zeros(share)
        for start in range(0, share, most):
            stop = min(start + most, share)
            for at, numbers in pieces_of(laid, rank, SIZE, start, stop):
                found[start:stop][at : at + len(numbers)] = numbers
        assert torch.equal(found, mine), f"rank {rank}"  # what no piece has is zero there
        whole = list(pieces_of(expected.flatten(), rank, SIZE, 3, 7))
        assert [at for at, _ in whole] == [0] and torch.equal(whole[0].numbers, mine[3:7])


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="copy_engines"):
        Gradients.like((4,), torch.float32, torch.device("cpu")).mul_(2.0)
