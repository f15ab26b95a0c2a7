"""The divergence's row kernels against the reference in float64, as `head_rows`: `python -m tests.helpers.divergence_rows`."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import divergence as reference, divergence_triton
from dovetail.kernels.divergence import Divergence, Pair
from dovetail.kernels.reference import vocab_stats
from dovetail.nn.heads import combine
from tests.helpers.divergence_terms import terms_of
from tests.helpers.tolerances import sum_error, tensor_error

ROWS = 4
BLOCK = divergence_triton.COLUMNS
KINDS = (Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.3))


def cases() -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Name, both models' logits [n, V] in float32, and temperature or None."""
    draw = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.0, 1.0, 3.0, 7.0])[:, None]
    for columns, heat in ((5, torch.linspace(0.3, 3.0, ROWS)), (BLOCK + 37, None)):
        z, w = (torch.randn(ROWS, columns, generator=draw) * scale for _ in range(2))
        yield f"{columns} columns", z, w, heat
    near = torch.randn(ROWS, BLOCK, generator=draw)
    yield "near", near, near + 0.4 * torch.randn(near.shape, generator=draw), None
    never = torch.randn(ROWS, BLOCK + 1, generator=draw)
    never[:, 5:BLOCK] = float("-inf")
    yield "cannot occur", never, 2 * never, None


def measure(device: str) -> dict[str, dict[str, float]]:
    """Case and kind -> what -> error."""
    found = {}
    for name, z, w, heat in cases():
        n, columns = z.shape
        targets = torch.arange(n) % columns
        targets[-2:] = torch.tensor([-1, columns])
        draw = torch.Generator().manual_seed(1)
        grads = tuple(torch.randn(n, generator=draw) for _ in range(3))

        def pair(
            z: Tensor, w: Tensor, heat: Tensor | None = heat, targets: Tensor = targets
        ) -> Pair:
            exact = None if heat is None else heat.double()
            (_, own), (_, other) = (
                combine(_stats(x.double(), targets, exact), exact) for x in (z, w)
            )
            peak, total, offset, other_peak, other_total = (
                x.to(z.dtype) for x in (*own, other.peak, other.total)
            )
            return Pair(
                w,
                peak,
                total,
                offset,
                other_peak,
                other_total,
                None if heat is None else heat.to(z.dtype),
            )

        for kind in KINDS:
            exact_pair, own_pair = pair(z.double(), w.double()), pair(z, w)
            expected = reference.divergence_sums(z.double(), exact_pair, kind)
            moved: list[Any] = [x if x is None else x.to(device) for x in own_pair]
            own = Pair(*moved)
            sums = divergence_triton.divergence_sums(z.to(device), own, kind)
            value = kind.of(*sums.cpu().unbind(1))
            terms = terms_of(z, w, heat, kind)
            errors = {"value": sum_error(value, kind.of(*expected.unbind(1)), terms)}
            for h, dtypes in (
                (grads[1], (torch.float32, torch.bfloat16)),
                (None, (torch.float32,)),
            ):
                exact_grads: Any = [x if x is None else x.double() for x in (grads[0], h, grads[2])]
                want = reference.divergence_grad_(
                    z.double(), exact_pair, targets, exact_grads, expected[:, 1], kind
                )
                for dtype in dtypes:
                    given: Any = [x if x is None else x.to(device) for x in (grads[0], h, grads[2])]
                    copy = z.to(device, copy=True)
                    out = divergence_triton.divergence_grad_(
                        copy, own, targets.to(device), given, sums[:, 1], kind, dtype=dtype
                    )
                    errors[f"{dtype} {'plain' if h is None else 'entropy'}"] = tensor_error(
                        out.cpu().double(), want
                    )
            found[f"{name}, {kind.kind}"] = errors
    return found


def _stats(z: Tensor, targets: Tensor, heat: Tensor | None) -> Tensor:
    return vocab_stats(z, targets, heat)[None]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure("cuda" if torch.cuda.is_available() else "cpu")) + "\n")
