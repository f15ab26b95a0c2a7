"""python -m tests.helpers.quack_rows: a mixture with gathered and gated products, which plain torch stands in for, against the
reference: JSON on stdout. Run with TRITON_INTERPRET=1; tests/gpu/test_quack.py has the products themselves.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels import moe_triton
from dovetail.kernels.quack_moe import mixture
from dovetail.kernels.registry import KernelSet
from dovetail.nn.products import Products
from tests.helpers.held import Held

WIDTH, FEATURES = 64, 24


def spans(starts: Tensor) -> list[slice]:
    """Each expert's rows."""
    ends = starts.tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def joined(parts: list[Tensor], rows: int) -> Tensor:
    """One expert's after the other's; what lies behind them nobody wrote."""
    found = torch.cat(parts)
    return torch.cat((found, found.new_full((rows - len(found), *found.shape[1:]), float("nan"))))


def gated_product(
    x: Tensor, weight: Tensor, starts: Tensor, source: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairs of gate and up, and silu(gate) up, each rounded once."""
    rows = x[source.long() % len(x)].float()  # behind the last copy anything stands
    z = joined(
        [rows[span] @ w.float().T for span, w in zip(spans(starts), weight, strict=True)], len(rows)
    )
    gate, up = z.chunk(2, dim=1)
    return torch.stack((gate, up), 2).flatten(1).to(x.dtype), (F.silu(gate) * up).to(x.dtype)


def gated_product_into(
    x: Tensor, weight: Tensor, half: Tensor, starts: Tensor, source: Tensor
) -> Tensor:
    """The first of the two; the second goes into `half`."""
    both, found = gated_product(x, weight, starts, source)
    half.copy_(found)
    return both


def gated(x: Tensor, weight: Tensor, starts: Tensor, source: Tensor) -> Tensor:
    """The second of the two."""
    return gated_product(x, weight, starts, source)[1]


def never(*_: Any) -> Tensor:
    """For who learns nothing."""
    raise AssertionError("pairs that nobody needs")


def product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """x w.T by expert."""
    found = [x[span].float() @ w.float().T for span, w in zip(spans(starts), weight, strict=True)]
    return joined(found, len(x)).to(x.dtype)


def gated_gradient(
    dy: Tensor, weight: Tensor, both: Tensor, starts: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As the formulas say, for pairs."""
    rows = dy.float()
    plain = joined(
        [rows[span] @ w.float() for span, w in zip(spans(starts), weight, strict=True)], len(rows)
    )
    gate, up = both.float().unflatten(1, (-1, 2)).unbind(2)
    half, sigmoid, d_half = F.silu(gate) * up, gate.sigmoid(), plain * scale[:, None]
    d_gate, d_up = d_half * up * sigmoid * (1 + gate * (1 - sigmoid)), d_half * F.silu(gate)
    pairs = torch.stack((d_gate, d_up), 2).flatten(1)
    return pairs.to(dy.dtype), (half * scale[:, None]).to(dy.dtype), (half * plain).sum(1)


def input_gradient(d_both: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Pairs times a weight whose gates come first."""
    pairs = [torch.stack(w.float().chunk(2), 1).flatten(0, 1) for w in weight]
    found = [d_both[span].float() @ w for span, w in zip(spans(starts), pairs, strict=True)]
    return joined(found, len(d_both)).to(d_both.dtype)


def add_weight_grad_(
    total: Tensor, dz: Tensor, x: Tensor, *, starts: Tensor, first: bool = False
) -> None:
    """dz.T x by expert."""
    dw = torch.stack([dz[span].float().T @ x[span].float() for span in spans(starts)])
    total.copy_(dw) if first else total.add_(dw)


def add_joint_grad_(
    total: Tensor, d_both: Tensor, x: Tensor, *, starts: Tensor, first: bool = False
) -> None:
    """d_both.T x by expert, gates first."""
    pairs = torch.stack([d_both[span].float().T @ x[span].float() for span in spans(starts)])
    dw = pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    total.copy_(dw) if first else total.add_(dw)


PLAIN = SimpleNamespace(
    gated_product_into=gated_product_into,
    gated=gated,
    gated_gradient=gated_gradient,
    grouped_product=product,
    input_gradient=input_gradient,
    add_grouped_grad_=add_weight_grad_,
    add_grouped_joint_grad_=add_joint_grad_,
)
TRITON = KernelSet(permute=moe_triton.permute, unpermute=moe_triton.unpermute)


def computed(*args: Any, products: SimpleNamespace = PLAIN) -> Tensor:
    """By these products, or without rows by triton's kernels."""
    return Products(
        replace(TRITON, mixture=partial(mixture, products=products))
    ).mixture_of_experts(*args)


def error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of the exact one."""
    found = found.detach()
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-9))


def compared(
    tokens: int, copies: int, experts: int, *, nowhere: bool, dtype: torch.dtype
) -> dict[str, float]:
    """Results and gradients against the reference in float64, of the same rounded numbers."""
    torch.manual_seed(tokens)
    inputs: dict[str, Tensor] = {
        "x": torch.randn(tokens, WIDTH),
        "weights": torch.rand(tokens, copies),
        "gate_up": torch.randn(experts, 2 * FEATURES, WIDTH) / WIDTH**0.5,
        "down": torch.randn(experts, WIDTH, FEATURES) / FEATURES**0.5,
    }
    chosen = torch.stack(
        [torch.randperm(experts + nowhere * copies)[:copies] for _ in range(tokens)]
    ).clamp(max=experts)
    chosen[chosen == 1] = experts if nowhere else 0  # one expert without rows
    somewhere, up = int((chosen < experts).sum()), torch.randn(tokens, WIDTH).to(dtype)
    inputs = {name: x if name == "weights" else x.to(dtype) for name, x in inputs.items()}
    found: list[dict[str, Any]] = []
    for wide in (False, True):
        leaves = {
            k: (x.double() if wide else x).detach().requires_grad_() for k, x in inputs.items()
        }
        x, weights, gate_up, down = leaves.values()
        if wide:
            y = Products(KernelSet()).mixture_of_experts(
                x, chosen, weights.to(dtype).double(), (gate_up, down), somewhere
            )
        else:
            y = computed(x, chosen, weights, (gate_up, down), somewhere)
        grads = torch.autograd.grad(y, tuple(leaves.values()), up.to(y.dtype))
        found.append({"y": y, **{f"d {name}": g for name, g in zip(leaves, grads, strict=True)}})
        with torch.no_grad():
            scoring = SimpleNamespace(**{**vars(PLAIN), "gated_product_into": never})
            again = (
                y
                if wide
                else computed(x, chosen, weights, (gate_up, down), somewhere, products=scoring)
            )
        assert torch.equal(again, y)
    ours, exact = found
    zeros = float(ours["d weights"][chosen >= experts].abs().sum())
    added = handed_over(inputs, chosen, somewhere, up)
    sums = {f"sum of d {name}": error(x, 2 * exact[f"d {name}"]) for name, x in added.items()}
    return {name: error(ours[name], exact[name]) for name in ours} | sums | {"of nowhere": zeros}


def handed_over(
    inputs: dict[str, Tensor], chosen: Tensor, somewhere: int, up: Tensor
) -> dict[str, Tensor]:
    """The sums over two equal micro-batches of both weights' gradients. No second one comes from autograd."""
    held = Held(inputs["gate_up"], inputs["down"])
    for _ in range(2):
        y = computed(
            inputs["x"], chosen, inputs["weights"], held.both(), somewhere, held.defer_wgrad
        )
        y.backward(up.to(y.dtype))
    found = {name.removesuffix("_proj"): x for name, x in held.sums().items()}
    assert len(found) == 2 and all(x.dtype == torch.float32 for x in found.values())
    return found


def main() -> None:
    """Some shapes, with and without entries that are nowhere."""
    cases = [
        (12, 4, 8, False),
        (11, 3, 5, True),
        (1, 2, 4, True),
        (7, 8, 16, True),
        (9, 1, 2, True),
    ]
    found = {
        f"{tokens} {copies} {experts} {nowhere}": compared(
            tokens, copies, experts, nowhere=nowhere, dtype=torch.bfloat16
        )
        for tokens, copies, experts, nowhere in cases
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
