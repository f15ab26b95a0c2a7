"""Ascend NPUs by torch_npu. Not run on hardware yet; tests/npu has the signatures of its wheel."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import reference, reference_experts
from dovetail.kernels.reference import Spans

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 768
MAX_HEADS = 256  # of fused attention
MAX_SEQUENCES = 1024
ROTARY_LIMIT = 896  # rotated channels, exclusive
MASK = 2048  # side of the causal mask
GROUPED_LIMIT = 65536  # inner dim of a grouped product, exclusive
CAUSAL = 3
BAND = 4  # sparse_mode: aligned at the bottom right
GROUP_BY_ROWS = 0
GROUP_BY_INNER = 2  # group_type
ONE_TENSOR = 3  # split_item
CUMULATIVE = 0  # group_list_type


@dataclass(frozen=True)
class NpuKernels:
    """ops: the module torch_npu. Unsupported inputs take the reference."""

    ops: Any
    device: torch.device

    @cached_property
    def causal_mask(self) -> Tensor:
        return torch.ones(MASK, MASK, dtype=torch.bool, device=self.device).triu(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _supported(x) or x.dtype != weight.dtype:
            return reference.rms_norm(x, weight, eps)
        return self.ops.npu_rms_norm(x, weight, epsilon=eps)[0]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary_dim = 2 * cos.shape[-1]
        if not _supported(x) or rotary_dim >= ROTARY_LIMIT:
            return reference.rope(x, cos, sin)
        rotated, rest = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
        r1, r2 = (torch.cat((table, table), dim=-1)[None, :, None] for table in (cos, sin))
        y: Tensor = self.ops.npu_rotary_mul(rotated[None], r1, r2, rotary_mode="half")[0]
        return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y

    def add_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x if y is None else x + y
        return total, self.rms_norm(total, weight, eps)

    def heads(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return reference.heads(*args, norm=self.rms_norm, rotate=self.rope)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return (
            self.ops.npu_swiglu(gate_up, dim=-1)
            if _supported(gate_up)
            else reference.swiglu(gate_up)
        )

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_spans: Spans,
        k_spans: Spans,
        window: int | None = None,
    ) -> Tensor:
        _, heads, head_dim = q.shape
        if not _supported(q) or head_dim > MAX_HEAD_DIM or heads > MAX_HEADS:
            return reference.attention(q, k, v, q_spans, k_spans, window)
        sparse = {"sparse_mode": CAUSAL}
        if window is not None:  # the query's own key included
            sparse = {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}
        out = []
        v_dim = v.shape[-1]
        v = reference.pad_values(k, v)
        start_q = start_k = 0
        for first in range(0, len(q_spans.lengths), MAX_SEQUENCES):
            chunk = slice(first, first + MAX_SEQUENCES)
            ends_q, ends_k = (
                list(itertools.accumulate(spans.lengths[chunk])) for spans in (q_spans, k_spans)
            )
            stop_q = start_q + ends_q[-1]
            stop_k = start_k + ends_k[-1]
            mixed = self.ops.npu_fusion_attention(
                q[start_q:stop_q],
                k[start_k:stop_k],
                v[start_k:stop_k],
                heads,
                "TND",
                atten_mask=self.causal_mask,
                scale=head_dim**-0.5,
                actual_seq_qlen=ends_q,
                actual_seq_kvlen=ends_k,
                **sparse,
            )[0]
            out.append(mixed)
            start_q = stop_q
            start_k = stop_k
        return (out[0] if len(out) == 1 else torch.cat(out))[..., :v_dim]

    def grouped_mm(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        if not _supported(x) or max(weight.shape[1:]) >= GROUPED_LIMIT:
            return reference_experts.grouped_mm(x, weight, offsets)
        return _GroupedProduct.apply(x, weight, offsets.to(torch.int64), self.ops)

    def permute(
        self, x: Tensor, experts: Tensor, count: int, total: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _supported(x) or total is not None:
            return reference_experts.permute(x, experts, count, total)
        copies, rows = self.ops.npu_moe_token_permute(x, experts)
        return copies, rows, reference.count_rows(experts.flatten(), count).cumsum(0)

    def unpermute(self, x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
        if not _supported(x) or weights is None or len(x) < len(rows):
            return reference_experts.unpermute(x, rows, weights)
        return self.ops.npu_moe_token_unpermute(x, rows.to(torch.int32), probs=weights.to(x.dtype))


def _supported(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.numel() > 0


class _GroupedProduct(torch.autograd.Function):
    """forward: y = x w[e] by expert e. backward: dx = dy w[e].T; dw[e] = x.T dy over its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.ops = ops
        return _grouped(ops, x, weight, ends, GROUP_BY_ROWS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,) = grads
        (x, weight, ends) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = (
            _grouped(ctx.ops, dy, weight.transpose(1, 2), ends, GROUP_BY_ROWS)
            if ctx.needs_input_grad[0]
            else None
        )
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        dw = _grouped(ctx.ops, x.T, dy, ends, GROUP_BY_INNER)
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return (
            dx,
            dw.masked_fill(empty[:, None, None], 0),
            None,
            None,
        )  # results of empty groups are unspecified


def _grouped(ops: Any, x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    options = {"split_item": ONE_TENSOR, "group_type": group_type, "group_list_type": CUMULATIVE}
    return ops.npu_grouped_matmul([x], [weight], group_list=ends, **options)[0]
