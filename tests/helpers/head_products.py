"""The head's products by quack, whose first is stood for by one that leaves what a tile leaves: errors by case, on a CPU.

As a process, `TRITON_INTERPRET=1 python -m tests.helpers.head_products`, it writes them as one line of JSON.
"""

import json
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import quack, quack_head, reference
from dovetail.nn.heads import combine
from tests.helpers.quack_stand_in import StandIn
from tests.helpers.tolerances import tensor_error

SIZES = [
    (5, 16, 8),
    (1, 64, 1000),
    (70, 32, 200),
    (33, 8, 192 * 40),
]  # rows, width, columns; the last fill several steps


class Epilogue(ModuleType):
    """The module `kernels.quack_epilogue`, and how often logits were kept."""

    kept = 0

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse: Tensor | None,
        out: Any,
        tile: tuple[int, int],
    ) -> None:
        z, planes, picked = out
        assert planes.shape == (3, len(x), -(-len(weight) // tile[1])) and planes.stride(1) == 1
        logits = x.to(torch.float32) @ weight.to(torch.float32).T
        if z is not None:
            self.kept += 1
            z.copy_(logits)
        scaled = logits if inverse is None else logits * inverse[:, None]
        for i, columns in enumerate(scaled.split(tile[1], 1)):
            planes[:, :, i] = reference.vocab_stats(columns, targets)[:, :3].T
        mine = ((targets >= 0) & (targets < len(weight))).nonzero()[:, 0]
        picked[mine] = scaled[mine, targets[mine]]


def measure() -> dict[str, dict[str, float]]:
    """Case -> what -> error."""
    epilogue, package, found = Epilogue(quack.EPILOGUE), StandIn(), {}
    sys.modules |= {epilogue.__name__: epilogue, package.__name__: package}
    for n, width, columns in SIZES:
        draw = torch.Generator().manual_seed(n)
        x = torch.randn(n, width, generator=draw).to(torch.bfloat16)
        assert not quack.takes(x, x[:0]), "a rank without columns has no product"
        weight = (
            torch.randn(columns, width, generator=draw).mul_(2 * width**-0.5).to(torch.bfloat16)
        )
        targets = torch.randint(-columns // 2, 2 * columns, (n,), generator=draw)
        for temperature in (None, torch.linspace(0.3, 3.0, n)):
            z, stats = quack_head.logit_stats(x, weight, targets, temperature, keep=True)
            nothing, again = quack_head.logit_stats(x, weight, targets, temperature, keep=False)
            assert z is not None and nothing is None and torch.equal(stats, again)
            exact = None if temperature is None else temperature.to(torch.float64)
            want = reference.vocab_stats(z.to(torch.float64), targets, exact)
            (got, sums), (true, true_sums) = (
                combine(stats[None], temperature),
                combine(want[None], exact),
            )
            pairs = dict(
                zip(
                    (*got._fields, *sums._fields),
                    zip((*got, *sums), (*true, *true_sums), strict=True),
                    strict=True,
                )
            )
            errors = {name: tensor_error(a, b) for name, (a, b) in pairs.items()}
            found[
                f"{n} x {width} x {columns}, {'plain' if temperature is None else 'temperature'}"
            ] = errors
        assert z is not None
        dz, total = z.to(torch.bfloat16), torch.randn(columns, width, generator=draw)
        errors = found[f"{n} x {width} x {columns}, gradients"] = {}
        for first in (True, False):
            dx, dw = torch.empty_like(x), total.clone()
            quack_head.logit_grads_(dz, x, weight, dx, dw, first=first)
            product = dz.to(torch.float64).T @ x.to(torch.float64)
            errors[f"dw bfloat16, first {first}"] = tensor_error(
                dw, product if first else total + product
            )
            errors["dx bfloat16"] = tensor_error(
                dx, dz.to(torch.float64) @ weight.to(torch.float64)
            )
    assert epilogue.kept == 2 * len(SIZES), "logits were kept that nobody asked for"
    assert package.calls == {"product": 3 * len(SIZES), "sum": len(SIZES)}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
