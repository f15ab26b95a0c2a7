"""Stands for the module torch_npu: takes the same calls, by the signatures of its wheel, and computes them on a CPU.

torch itself checks names, types and defaults, since the operations are registered under the wheel's own schemas. What
the wheel's documentation demands beyond (dtypes, shapes, limits) is asserted here, and each operation is computed by the
formula given there, not by our reference. Only those that torch_npu can differentiate let gradients through.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIGNATURES = json.loads(Path(__file__).with_name("npu_signatures.json").read_text())["operations"]
NAMESPACE = "npu_stand_in"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNBOUND = 2147483647


class StandIn:
    """The operations as attributes, and how often each was computed."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(getattr(torch.ops, NAMESPACE), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return operation(*args, **kwargs)

        return call


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert x.dtype in DTYPES and gamma.dtype == x.dtype, (x.dtype, gamma.dtype)
    assert 2 <= x.dim() <= 8 and gamma.shape == x.shape[-gamma.dim() :], (x.shape, gamma.shape)
    wide = x.to(torch.float32)
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.to(torch.float32)).to(x.dtype), rstd


def _rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert x.dtype in DTYPES and r1.dtype == r2.dtype == x.dtype
    batch, length, heads, width = x.shape  # BSND
    assert width % 2 == 0 and width < 896 and batch < 1000 and heads < 1000, x.shape
    assert r1.shape == r2.shape == (1, length, 1, width), (x.shape, r1.shape)
    assert rotary_mode == "half" and rotate is None
    first, second = x.chunk(2, -1)
    return r1 * x + r2 * torch.cat((-second, first), dim=-1)


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    assert x.dtype in DTYPES and 1 <= x.dim() <= 8 and x.shape[dim] % 2 == 0
    a, b = x.chunk(2, dim)
    return a * a.sigmoid() * b


def _fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *middle: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    names = [a.name for a in torch.ops.npu_stand_in.npu_fusion_attention.default._schema.arguments]
    given = dict(zip(names[5:], middle, strict=False)) | options
    assert (
        input_layout == "TND" and query.dtype in DTYPES and query.dtype == key.dtype == value.dtype
    )
    tokens, heads, width = query.shape
    assert heads == head_num and heads <= 256 and heads % key.shape[1] == 0 and width <= 768
    assert key.shape == value.shape and key.shape[2] == width and 1 <= tokens <= 2**20
    ends = given.pop("actual_seq_qlen"), given.pop("actual_seq_kvlen")
    assert len(ends[0]) == len(ends[1]) <= 1024 and (ends[0][-1], ends[1][-1]) == (tokens, len(key))
    mask, mode = given.pop("atten_mask"), given.pop("sparse_mode")
    assert mask.dtype == torch.bool and torch.equal(
        mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    )
    before, after = given.pop("pre_tockens", UNBOUND), given.pop("next_tockens", UNBOUND)
    assert mode in (3, 4)
    if mode == 3:  # ignores both numbers
        before, after = UNBOUND, 0
    scale = given.pop("scale")
    unused = {
        "keep_prob": 1.0,
        "inner_precise": 0,
        "gen_mask_parallel": True,
        "sync": False,
        "softmax_layout": "",
    }
    unused |= {"seed": 0, "offset": 0}
    assert all(x is None or x == unused.get(name) for name, x in given.items()), given
    out = []
    for (q0, q1), (k0, k1) in zip(*(pairwise([0, *e]) for e in ends), strict=True):
        assert q1 - q0 <= k1 - k0, "a row of the mask would be empty"
        keys, values = (
            x[k0:k1].repeat_interleave(heads // key.shape[1], 1).transpose(0, 1)
            for x in (key, value)
        )
        at = torch.arange(k1 - k0)[None] - (torch.arange(q1 - q0) + (k1 - k0) - (q1 - q0))[:, None]
        scores = (query[q0:q1].transpose(0, 1) @ keys.transpose(1, 2)).to(torch.float32) * scale
        weights = scores.masked_fill((at > after) | (at < -before), float("-inf")).softmax(-1)
        out.append((weights.to(query.dtype) @ values).transpose(0, 1))
    statistics = torch.zeros(tokens, heads, 8)
    return torch.cat(out), statistics, statistics.clone(), query.new_empty(0), 0, 0, 0


def _grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    """Not differentiable: what it returns has no history."""
    given = {name: value for name, value in options.items() if value is not None}
    (a,), (b,) = x, weight
    ends = given.pop("group_list")
    assert a.dtype in DTYPES and a.dtype == b.dtype and max(a.shape[-1], b.shape[-1]) < 65536
    assert ends.dtype == torch.int64 and ends.dim() == 1 and bool((ends.diff() >= 0).all())
    assert (
        given.pop("split_item") == 3
        and given.pop("group_list_type", 0) == 0
        and given.pop("act_type", 0) == 0
    )
    by = given.pop("group_type")
    assert not given, given
    spans = list(pairwise([0, *ends.tolist()]))
    if by == 0:  # rows of x, one weight a group
        assert b.shape[0] == len(ends) and a.shape[1] == b.shape[1] and int(ends[-1]) == len(a)
        return [torch.cat([a[start:end] @ w for (start, end), w in zip(spans, b, strict=True)])]
    assert by == 2 and a.shape[1] == b.shape[0] == int(ends[-1])  # the inner dim
    nothing = torch.full(
        (a.shape[0], b.shape[1]), float("nan"), dtype=a.dtype
    )  # nobody says that it is zero
    return [
        torch.stack(
            [a[:, start:end] @ b[start:end] if end > start else nothing for start, end in spans]
        )
    ]


def _permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    assert (
        tokens.dtype in DTYPES and tokens.dim() == 2 and indices.dtype in (torch.int32, torch.int64)
    )
    assert (
        indices.shape[0] == len(tokens)
        and indices.dim() == 2
        and num_out_tokens is None
        and not padded_mode
    )
    order = indices.flatten().sort(stable=True).indices
    return tokens.repeat_interleave(indices.shape[1], 0)[order], order.argsort().to(torch.int32)


def _unpermute(
    permuted: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    assert permuted.dtype in DTYPES and sorted_indices.dtype == torch.int32 and probs is not None
    assert (
        probs.dtype in DTYPES
        and probs.numel() == len(sorted_indices) == len(permuted)
        and probs.shape[1] <= 512
    )
    assert not padded_mode and restore_shape is None
    copies = permuted.index_select(0, sorted_indices).view(*probs.shape, -1)
    return torch.einsum("tk,tkd->td", probs.to(permuted.dtype), copies)


IMPLEMENTATIONS = {
    "npu_rms_norm": _rms_norm,
    "npu_rotary_mul": _rotary_mul,
    "npu_swiglu": _swiglu,
    "npu_fusion_attention": _fusion_attention,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_token_permute": _permute,
    "npu_moe_token_unpermute": _unpermute,
}
LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # as long as it lives, the operations do
for _name, _signature in SIGNATURES.items():
    for _schema in _signature["schemas"]:
        LIBRARY.define(_schema)
    _key = "CompositeImplicitAutograd" if _signature["differentiable"] else "CPU"
    LIBRARY.impl(_name, IMPLEMENTATIONS[_name], _key)
