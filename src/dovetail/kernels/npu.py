"""What Ascend NPUs do differently from the reference: the fused operations of torch_npu.

Not run on hardware yet: every call is checked against the signatures in torch_npu's own wheel (tests/npu), and computed
there by a stand-in that follows its documentation. `ops` is the module torch_npu, or such a stand-in.
Operations without a backward pass of their own in torch_npu (the grouped product) have one here; the others have.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import reference
from dovetail.kernels.reference import Spans
from dovetail.kernels.token_permute import count_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_HEAD, MOST_HEADS = 768, 256  # of fused attention
MOST_SEQUENCES = 1024  # in one of its calls
LONGEST_TURN = 896  # channels that rotary multiplication turns, this one excluded
MASK = 2048  # side of the triangle that stands for a causal mask of any size
WIDEST = 65536  # inner dim of a grouped product, this one excluded
CAUSAL, BAND = 3, 4  # sparse modes that begin at the bottom right
BY_ROWS, BY_INNER = 0, 2  # dims that groups cut
ONE_TENSOR = 3  # of the ways to return groups
CUMULATIVE = 0  # of the ways to give their sizes


@dataclass(frozen=True)
class NpuKernels:
    """The operations of `reference` by those of `ops`; what these cannot do takes the reference."""

    ops: Any
    device: torch.device

    @cached_property
    def future(self) -> Tensor:
        """bool [MASK, MASK]: True where a query does not look."""
        return torch.ones(MASK, MASK, dtype=torch.bool, device=self.device).triu(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in DTYPES or x.dtype != weight.dtype or not x.numel():
            return reference.rms_norm(x, weight, eps)
        y: Tensor = self.ops.npu_rms_norm(x, weight, epsilon=eps)[0]
        return y

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, kept = 2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
        if x.dtype not in DTYPES or turned >= LONGEST_TURN or not x.numel():
            return reference.rope(x, cos, sin)
        first, rest = x.split([turned, kept], dim=-1)
        r1, r2 = (torch.cat((table, table), dim=-1)[None, :, None] for table in (cos, sin))  # [1, T, 1, R]
        y: Tensor = self.ops.npu_rotary_mul(first[None], r1, r2, rotary_mode="half")[0]
        return torch.cat((y, rest), dim=-1) if kept else y

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x if y is None else x + y
        return total, self.rms_norm(total, weight, eps)

    def heads(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return reference.heads(*given, norm=self.rms_norm, turn=self.rope)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in DTYPES or not gate_up.numel():
            return reference.swiglu(gate_up)
        y: Tensor = self.ops.npu_swiglu(gate_up, dim=-1)
        return y

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, k_spans: Spans, window: int | None = None
    ) -> Tensor:
        _, heads, head_dim = q.shape
        if q.dtype not in DTYPES or head_dim > LONGEST_HEAD or heads > MOST_HEADS or not q.numel():
            return reference.attention(q, k, v, q_spans, k_spans, window)
        if (narrow := v.shape[-1]) < head_dim:
            return self.attention(q, k, reference.as_wide_as(k, v), q_spans, k_spans, window)[..., :narrow]
        out = []
        at_q = at_k = 0
        for first in range(0, len(q_spans.lengths), MOST_SEQUENCES):
            some = slice(first, first + MOST_SEQUENCES)
            ends_q, ends_k = (list(itertools.accumulate(spans.lengths[some])) for spans in (q_spans, k_spans))
            stop_q, stop_k = at_q + ends_q[-1], at_k + ends_k[-1]
            mixed: Tensor = self.ops.npu_fusion_attention(
                q[at_q:stop_q],
                k[at_k:stop_k],
                v[at_k:stop_k],
                heads,
                "TND",
                atten_mask=self.future,
                scale=head_dim**-0.5,
                actual_seq_qlen=ends_q,
                actual_seq_kvlen=ends_k,
                **({"sparse_mode": CAUSAL} if window is None else _band(window)),
            )[0]
            out.append(mixed)
            at_q, at_k = stop_q, stop_k
        return out[0] if len(out) == 1 else torch.cat(out)

    def grouped_mm(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        if x.dtype not in DTYPES or max(weight.shape[1:]) >= WIDEST or not len(x):
            return reference.grouped_mm(x, weight, offsets)
        y: Tensor = _GroupedProduct.apply(x, weight, offsets.to(torch.int64), self.ops)
        return y

    def permute(
        self, x: Tensor, experts: Tensor, count: int, total: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.dtype not in DTYPES or not x.numel() or total is not None:
            return reference.permute(x, experts, count, total)
        copies, rows = self.ops.npu_moe_token_permute(x, experts)
        return copies, rows, count_rows(experts.flatten(), count).cumsum(0)

    def unpermute(self, x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
        if x.dtype not in DTYPES or not x.numel() or weights is None or len(x) < len(rows):
            return reference.unpermute(x, rows, weights)
        y: Tensor = self.ops.npu_moe_token_unpermute(x, rows.to(torch.int32), probs=weights.to(x.dtype))
        return y


class _GroupedProduct(torch.autograd.Function):
    """forward: y = x w[e] for the tokens of each expert e. backward: dx = dy w[e].T; dw[e] = x.T dy over its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.ops = ops
        return _grouped(ops, x, weight, ends, BY_ROWS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,), (x, weight, ends) = grads, ctx.saved_tensors
        dy = dy.contiguous()
        dx = _grouped(ctx.ops, dy, weight.transpose(1, 2), ends, BY_ROWS) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        dw = _grouped(ctx.ops, x.T, dy, ends, BY_INNER)
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return dx, dw.masked_fill(empty[:, None, None], 0), None, None  # of no tokens nothing is promised


def _grouped(ops: Any, x: Tensor, weight: Tensor, ends: Tensor, by: int) -> Tensor:
    """One call of the grouped product."""
    y: Tensor = ops.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=ONE_TENSOR, group_type=by, group_list_type=CUMULATIVE
    )[0]
    return y


def _band(window: int) -> dict[str, int]:
    """The arguments of a causal window of that many latest keys, the query's own included."""
    return {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}
