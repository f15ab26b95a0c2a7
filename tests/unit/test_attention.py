"""Packed attention and cached attention against the definition: a softmax over a full mask, one sequence at a time."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dovetail.batch.packed import cumulative
from dovetail.kernels import cuda, cudnn, fa4, reference
from dovetail.kernels.reference import QUERY_BLOCK, Spans
from dovetail.kernels.registry import kernels_for
from tests.helpers.fa4_stand_in import installed
from tests.helpers.tolerances import (
    GRADCHECK,
    OP_BF16,
    OP_FP64,
    assert_all_close,
    assert_close,
    tensor_error,
)

C = 4


def spans(*lengths: int) -> Spans:
    return Spans(cumulative(lengths), lengths)


def qkv(tq: int, tk: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((tq, heads, C), (tk, kv_heads, C), (tk, kv_heads, C))
    q, k, v = (
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return q, k, v


def defined(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None
) -> Tensor:
    """A [n, m] mask and softmax for every sequence and head; query i is at position i + m - n."""
    return defined_with_sums(q, k, v, q_spans, k_spans, window)[0]


def defined_with_sums(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, C] by the definition, and the log-sum-exps [T, H] of the scores."""
    out = []
    sums = []
    share = q.shape[1] // k.shape[1]
    pairs = zip(
        q.split(list(q_spans.lengths)),
        k.split(list(k_spans.lengths)),
        v.split(list(k_spans.lengths)),
        strict=True,
    )
    for queries, keys, values in pairs:
        n, m = len(queries), len(keys)
        at = torch.arange(n)[:, None] + m - n
        seen = torch.arange(m)[None, :] <= at
        if window is not None:
            seen &= torch.arange(m)[None, :] > at - window
        heads = []
        for h in range(q.shape[1]):
            scores = queries[:, h] @ keys[:, h // share].T / q.shape[2] ** 0.5
            heads.append(scores.masked_fill(~seen, float("-inf")))
        weights = [x.softmax(-1) @ values[:, h // share] for h, x in enumerate(heads)]
        out.append(torch.stack(weights, dim=1))
        sums.append(torch.stack([x.logsumexp(-1) for x in heads], dim=1))
    return torch.cat(out), torch.cat(sums)


LENGTHS = {
    "ragged": ((5, 1, 9), (5, 1, 9)),
    "single tokens side by side": ((1, 1, 1), (1, 1, 1)),
    "runs of equal lengths": ((3, 3, 7, 7, 7, 3), (3, 3, 7, 7, 7, 3)),
    "fewer queries than keys": ((2, 1, 4), (9, 6, 4)),
    "a sequence without queries": ((0, 3), (4, 5)),
    "equal queries, unequal keys": ((2, 2, 2), (5, 6, 6)),
    "longer than a block of queries": ((QUERY_BLOCK + 3,), (QUERY_BLOCK + 40,)),
    "a dense batch with keys before": ((3, 3), (5, 5)),
}
DENSE = (
    "single tokens side by side",
    "longer than a block of queries",
    "a dense batch with keys before",
)  # for FA4


@pytest.mark.parametrize("window", [None, 1, 4, 1000])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_equals_the_definition(name: str, heads: tuple[int, int], window: int | None) -> None:
    n, m = LENGTHS[name]
    q, k, v = qkv(sum(n), sum(m), *heads)
    found = reference.attention(q, k, v, spans(*n), spans(*m), window)
    expected = defined(q, k, v, spans(*n), spans(*m), window)
    assert_close(found, expected, OP_FP64, name)
    weights = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    grads = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected)]
    mine, wanted = (dict(zip("qkv", three, strict=True)) for three in grads)
    assert_all_close(mine, wanted, OP_FP64)


@pytest.mark.parametrize(
    "attention", [reference.attention, cuda.attention], ids=["reference", "cuda"]
)
def test_values_may_have_fewer_channels(attention: Callable[..., Tensor]) -> None:
    q, k, v = qkv(7, 13, 4, 4)
    at, narrow = (spans(2, 1, 4), spans(3, 6, 4)), v[..., :3]
    found = attention(q, k, narrow, *at)
    expected = defined(q, k, v, *at, None)[..., :3]
    assert_close(found, expected, OP_FP64)
    up = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = (torch.autograd.grad(out, (q, k, v), up) for out in (found, expected))
    for mine, wanted in zip(*grads, strict=True):
        assert_close(mine, wanted, OP_FP64)


@pytest.mark.parametrize(("wrong", "window"), [((6, 9), None), ((8, 7), 4)])
def test_boundaries_and_windows_make_a_difference(
    wrong: tuple[int, ...], window: int | None
) -> None:
    """The mutation: other boundaries, or one key more in the window, are noticed."""
    q, k, v = qkv(15, 15)
    expected = defined(q, k, v, spans(8, 7), spans(8, 7), window)
    moved = reference.attention(
        q, k, v, spans(*wrong), spans(*wrong), None if window is None else window + 1
    )
    assert tensor_error(moved, expected) > OP_FP64


def test_gradcheck_with_a_window() -> None:
    q, k, v = qkv(5, 8)
    at = (spans(2, 3), spans(4, 4))
    assert torch.autograd.gradcheck(
        lambda q, k, v: reference.attention(q, k, v, *at, 2),
        (q, k, v),
        atol=GRADCHECK,
        rtol=GRADCHECK,
    )


@pytest.mark.parametrize(
    ("window", "heads"), list(itertools.product([None, 1, 3], [(4, 2), (4, 1), (4, 4)]))
)
def test_a_cached_token_sees_what_the_last_query_sees(
    window: int | None, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (7, 1, 4)
    q, k, v = qkv(3, sum(lengths), *heads)
    expected = defined(q, k, v, spans(1, 1, 1), spans(*lengths), window)
    page, table = 3, torch.tensor([[4, 2, 7], [1, 0, 0], [3, 6, 0]])
    cache = torch.full(
        (2, 8, heads[1], page, C), 1e3, dtype=torch.float64
    )  # what lies past a row's end must not count
    for i, entries in enumerate(zip(k.split(list(lengths)), v.split(list(lengths)), strict=True)):
        for x, held in zip(entries, (cache[0], cache[1]), strict=True):
            for at, entry in enumerate(x):
                held[table[i, at // page], :, at % page] = entry
    found = reference.decode_attention(q, cache[0], cache[1], table, torch.tensor(lengths), window)
    monkeypatch.setattr(reference, "GATHER_BLOCK", 1)
    assert_close(
        reference.decode_attention(q, cache[0], cache[1], table, torch.tensor(lengths), window),
        found,
        OP_FP64,
        "rows apart",
    )
    assert_close(found, expected, OP_FP64)
    late = reference.decode_attention(
        q, cache[0], cache[1], table, torch.tensor(lengths) + 1, window
    )
    assert tensor_error(late, expected) > OP_FP64


@pytest.mark.parametrize("head_dim", [12, 264])
def test_head_dims_beyond_flash_attention_take_the_reference(head_dim: int) -> None:
    """On a CPU, which has no packed flash attention: so the result shows that it was not asked for."""
    q, k, v = torch.randn(3, 5, 2, head_dim, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    where = spans(2, 3)
    assert torch.equal(
        cuda.attention(q, k, v, where, where), reference.attention(q, k, v, where, where)
    )


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 2), (64, 64)), ((2, 2), (192, 128)), ((3, 1), (128, 128))], ids=str
)
@pytest.mark.parametrize(
    "name", ["ragged", "fewer queries than keys", "a sequence without queries", *DENSE]
)
def test_fa4_is_asked_for_the_same(
    name: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-in has the package's parameters and computes in float64; its results are rounded once.

    The gradient of the scores, P (dP - D), is a difference whose D = dO . O takes the outputs O as
    they were rounded. It is off by P dO . (O - exact), which the expected gradients have, too.
    """
    monkeypatch.setattr(fa4, "PACK_GQA_QUERIES", 0)
    (n, m), draw = LENGTHS[name], torch.Generator().manual_seed(0)
    shapes = ((sum(n), heads[0], dims[0]), (sum(m), heads[1], dims[0]), (sum(m), heads[1], dims[1]))
    q, k, v = (
        torch.randn(shape, generator=draw).to(torch.bfloat16).requires_grad_() for shape in shapes
    )
    with installed() as package:
        found = fa4.attention(q, k, v, spans(*n), spans(*m), window)
        up = torch.randn(found.shape, generator=draw).to(torch.bfloat16)
        ours = torch.autograd.grad(found, (q, k, v), up)
        assert package.calls == {"forward": 1, "backward": 1} and not package.deterministic
        assert package.dense == (2 if name in DENSE else 0)
    exact = [x.detach().to(torch.float64).requires_grad_() for x in (q, k, v)]
    expected, sums = defined_with_sums(exact[0], exact[1], exact[2], spans(*n), spans(*m), window)
    assert_close(found, expected, OP_BF16)
    wide_up = up.to(torch.float64)
    rounded = (wide_up * (found.detach() - expected.detach())).sum(-1)
    total = (wide_up * expected).sum() - (rounded * sums).sum()  # d sums / d scores = P
    for mine, wanted in zip(ours, torch.autograd.grad(total, exact), strict=True):
        assert_close(mine, wanted, OP_BF16)


def test_fa4_compiles_every_form_ahead() -> None:
    """What packs of any lengths ask for, after `compile_kernels`, asks for no other form: no step waits for a compiler."""
    with installed() as package:
        package.computes = False
        fa4.compile_kernels((4, 2), (64, 64), True, torch.bfloat16, torch.device("cpu"))
        known = set(package.forms)
        for lengths in (
            [1],
            [3, 3],
            [7, 200],
            [300],
            [300, 300],
            [2] * 300,
            [2] * 300 + [400],
            [257] * 258,
        ):
            for window in (None, 5, 300):
                q, k, v = (
                    torch.zeros(1, heads, 64, dtype=torch.bfloat16).expand(sum(lengths), -1, -1)
                    for heads in (4, 2, 2)
                )
                with torch.no_grad():
                    fa4.attention(q, k, v, spans(*lengths), spans(*lengths), window)
        assert package.forms == known and len(known) == 10


def test_fa4_is_deterministic_where_torch_is_told_to_be() -> None:
    q, k, v = torch.randn(3, 5, 2, 64, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    with installed() as package:
        torch.use_deterministic_algorithms(True)
        try:
            fa4.attention(q.requires_grad_(), k, v, spans(2, 3), spans(2, 3)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert package.deterministic


@pytest.mark.parametrize(
    ("dtype", "heads", "dims"),
    [
        (torch.float32, (2, 2), (64, 64)),
        (torch.bfloat16, (2, 2), (12, 12)),
        (
            torch.bfloat16,
            (2, 1),
            (192, 128),
        ),  # its backward pass wants equal dims where heads are shared
    ],
)
def test_what_fa4_does_not_take_goes_on(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda, "attention", lambda *given: asked.append(given))
    q, k, v = (
        torch.zeros(5, h, c, dtype=dtype)
        for h, c in zip((heads[0], heads[1], heads[1]), (dims[0], *dims), strict=True)
    )
    with installed() as package:
        fa4.attention(q, k, v, spans(2, 3), spans(2, 3), 4)
        assert not package.calls
    assert len(asked) == 1 and asked[0][0] is q and asked[0][-1] == 4


def test_the_operations_of_fa4_have_shapes_without_being_run() -> None:
    """What a compiler and a checkpoint rely on: schema, fake results and the autograd formula fit each other."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(5, h, 64, generator=draw).to(torch.bfloat16).requires_grad_() for h in (4, 2, 2)
    )
    ends = cumulative((2, 3))
    with installed():
        torch.library.opcheck(fa4.packed_attention, (q, k, v, [ends, ends], [3, 3], None, False))
        for n in (5, 1):
            torch.library.opcheck(fa4.packed_attention, (q, k, v, [], [n, n], None, False))


@pytest.mark.parametrize(
    ("n", "m", "window", "dense"),
    [
        ((2048,), (2048,), None, True),
        ((1024, 1024), (1024, 1024), None, True),
        ((1024,), (1024,), 1024, True),  # a window that sees everything
        ((1024,), (1024,), 1023, False),
        ((1024, 1023), (1024, 1023), None, False),
        ((1024,), (2048,), None, False),  # causal from the bottom right, which it cannot do
        ((1023,), (1023,), None, False),  # a shape that hardly comes again
        ((cudnn.LONG + 1,), (cudnn.LONG + 1,), None, True),
        ((), (), None, False),
    ],
)
def test_cudnn_takes_what_is_dense(
    n: tuple[int, ...],
    m: tuple[int, ...],
    window: int | None,
    dense: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a stand-in: what the operation of cuDNN is asked for, and that the rest goes to torch."""
    asked = []

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asked.append(q.shape)
        return torch.stack([q.mean(-1) + k.sum() + v.sum()] * v.shape[-1], dim=-1)

    monkeypatch.setattr(cudnn, "causal", causal)
    monkeypatch.setattr(cudnn, "can_use_cudnn_attention", lambda _: True)
    monkeypatch.setattr(cuda, "attention", lambda q, *_: q + 1)
    q, k, v = (
        torch.randn(sum(n), 2, 1, generator=torch.Generator().manual_seed(0)),
        *torch.zeros(2, sum(m), 1, 1),
    )
    found = cudnn.attention(q, k, v, spans(*n), spans(*m), window)
    assert asked == ([(len(n), 2, n[0], 1)] if dense else [])
    assert torch.equal(found, q if dense else q + 1), "tokens come back in their order"


def test_who_computes_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels_for(gpu).describe()["attention"] == "cudnn"
    with installed():
        assert kernels_for(gpu).describe()["attention"] == "fa4"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        assert kernels_for(gpu).describe()["attention"] == "cuda"
    assert kernels_for(torch.device("cpu")).attention is reference.attention


def test_a_package_that_does_not_load_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").write_text("import a_package_that_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with (
        mock.patch.dict(sys.modules),
        pytest.warns(UserWarning, match="lacks a_package_that_it_needs"),
    ):
        assert not cuda.package_usable(fa4.INTERFACE, torch.device("cuda"))
