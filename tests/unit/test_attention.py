"""Packed attention and cached attention against the definition: a softmax over a full mask, one sequence at a time."""

import itertools

import pytest
import torch
from torch import Tensor

from dovetail.batch import cumulative
from dovetail.kernels import cuda, reference
from dovetail.kernels.reference import QUERY_BLOCK, Spans
from tests.tolerances import GRADCHECK, OP_FP64, assert_all_close, assert_close, tensor_error

C = 4


def spans(*lengths: int) -> Spans:
    return Spans(cumulative(lengths), lengths)


def qkv(tq: int, tk: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((tq, heads, C), (tk, kv_heads, C), (tk, kv_heads, C))
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def defined(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None) -> Tensor:
    """A [n, m] mask and softmax for every sequence and head; query i is at position i + m - n."""
    out = []
    share = q.shape[1] // k.shape[1]
    pairs = zip(
        q.split(list(q_spans.lengths)), k.split(list(k_spans.lengths)), v.split(list(k_spans.lengths)), strict=True
    )
    for queries, keys, values in pairs:
        n, m = len(queries), len(keys)
        at = torch.arange(n)[:, None] + m - n
        seen = torch.arange(m)[None, :] <= at
        if window is not None:
            seen &= torch.arange(m)[None, :] > at - window
        heads = []
        for h in range(q.shape[1]):
            scores = queries[:, h] @ keys[:, h // share].T / C**0.5
            heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[:, h // share])
        out.append(torch.stack(heads, dim=1))
    return torch.cat(out)


LENGTHS = {
    "ragged": ((5, 1, 9), (5, 1, 9)),
    "single tokens side by side": ((1, 1, 1), (1, 1, 1)),
    "runs of equal lengths": ((3, 3, 7, 7, 7, 3), (3, 3, 7, 7, 7, 3)),
    "fewer queries than keys": ((2, 1, 4), (9, 6, 4)),
    "a sequence without queries": ((0, 3), (4, 5)),
    "equal queries, unequal keys": ((2, 2, 2), (5, 6, 6)),
    "longer than a block of queries": ((QUERY_BLOCK + 3,), (QUERY_BLOCK + 40,)),
}


@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_equals_the_definition(name: str, heads: tuple[int, int], window: int | None) -> None:
    n, m = LENGTHS[name]
    q, k, v = qkv(sum(n), sum(m), *heads)
    found = reference.attention(q, k, v, spans(*n), spans(*m), window)
    expected = defined(q, k, v, spans(*n), spans(*m), window)
    assert_close(found, expected, OP_FP64, name)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected)]
    mine, wanted = (dict(zip("qkv", three, strict=True)) for three in grads)
    assert_all_close(mine, wanted, OP_FP64)


@pytest.mark.parametrize(("wrong", "window"), [((6, 9), None), ((8, 7), 4)])
def test_boundaries_and_windows_make_a_difference(wrong: tuple[int, ...], window: int | None) -> None:
    """The mutation: other boundaries, or one key more in the window, are noticed."""
    q, k, v = qkv(15, 15)
    expected = defined(q, k, v, spans(8, 7), spans(8, 7), window)
    moved = reference.attention(q, k, v, spans(*wrong), spans(*wrong), None if window is None else window + 1)
    assert tensor_error(moved, expected) > OP_FP64


def test_gradcheck_with_a_window() -> None:
    q, k, v = qkv(5, 8)
    at = (spans(2, 3), spans(4, 4))
    assert torch.autograd.gradcheck(
        lambda q, k, v: reference.attention(q, k, v, *at, 2), (q, k, v), atol=GRADCHECK, rtol=GRADCHECK
    )


@pytest.mark.parametrize(("window", "heads"), list(itertools.product([None, 1, 3], [(4, 2), (4, 1), (4, 4)])))
def test_a_cached_token_sees_what_the_last_query_sees(
    window: int | None, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (7, 1, 4)
    q, k, v = qkv(3, sum(lengths), *heads)
    expected = defined(q, k, v, spans(1, 1, 1), spans(*lengths), window)
    page, table = 3, torch.tensor([[4, 2, 7], [1, 0, 0], [3, 6, 0]])
    cache = torch.full((2, 8, heads[1], page, C), 1e3, dtype=torch.float64)  # what lies past a row's end must not count
    for i, entries in enumerate(zip(k.split(list(lengths)), v.split(list(lengths)), strict=True)):
        for x, held in zip(entries, (cache[0], cache[1]), strict=True):
            for at, entry in enumerate(x):
                held[table[i, at // page], :, at % page] = entry
    found = reference.decode_attention(q, cache[0], cache[1], table, torch.tensor(lengths), window)
    monkeypatch.setattr(reference, "GATHERED", 1)
    assert_close(
        reference.decode_attention(q, cache[0], cache[1], table, torch.tensor(lengths), window),
        found,
        OP_FP64,
        "rows apart",
    )
    assert_close(found, expected, OP_FP64)
    late = reference.decode_attention(q, cache[0], cache[1], table, torch.tensor(lengths) + 1, window)
    assert tensor_error(late, expected) > OP_FP64


@pytest.mark.parametrize("head_dim", [12, 264])
def test_head_dims_beyond_flash_attention_take_the_reference(head_dim: int) -> None:
    """On a CPU, which has no packed flash attention: so the result shows that it was not asked for."""
    q, k, v = torch.randn(3, 5, 2, head_dim, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    where = spans(2, 3)
    assert torch.equal(cuda.attention(q, k, v, where, where), reference.attention(q, k, v, where, where))
