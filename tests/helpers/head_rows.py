"""The head's row kernels against the reference in float64: errors by case, on a GPU or (TRITON_INTERPRET=1) a CPU.

As a process, `python -m tests.helpers.head_rows`, it writes them as one line of JSON: triton decides when it is first
imported whether it interprets.
"""

import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from dovetail.kernels import logprob_triton, reference
from dovetail.nn.heads import combine
from tests.helpers.large_logits import gradient_errors
from tests.helpers.tolerances import tensor_error

ROWS = 6
BLOCK = logprob_triton.COLUMNS
WIDTHS = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 37)


def cases(device: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Name, float32 logits [n, V], local targets [n] (the last two are other ranks'), temperature [n] or None.

    On a CPU either of both, but where a row begins a block.
    """
    draw = torch.Generator().manual_seed(0)
    for number, columns in enumerate(WIDTHS):
        z = (
            torch.randn(ROWS, columns, generator=draw)
            * torch.tensor([0.0, 0.1, 1.0, 5.0, 20.0, 40.0])[:, None]
        )
        targets = torch.randint(columns, (ROWS,), generator=draw)
        targets[-2:] = torch.tensor([-1, columns])
        temperature = torch.linspace(0.3, 3.0, ROWS)
        if device != "cpu" or number % 2 == 0:
            yield f"{columns} columns", z.to(device), targets.to(device), None
        if device != "cpu" or number % 2 or columns == BLOCK + 1:
            yield (
                f"{columns} columns, temperature",
                z.to(device),
                targets.to(device),
                temperature.to(device),
            )
    far = torch.tensor([-1e4, -300.0, 0.0, 300.0, 1e4, 3e4])[:, None] + torch.randn(
        ROWS, BLOCK + 9, generator=draw
    )
    yield "far from zero", far.to(device), targets.to(device), None
    rising = (
        torch.linspace(-1.0, 1.0, 2 * BLOCK)
        * torch.tensor([1.0, 30.0, 1e3, -1.0, -30.0, -1e3])[:, None]
    )
    yield "rising and falling", rising.to(device), targets.to(device), None
    never = torch.randn(ROWS, 2 * BLOCK + 1, generator=draw)
    never[:, :BLOCK] = float("-inf")  # a whole first step of a row that cannot occur
    never[1, BLOCK + 5 :] = float("-inf")
    yield "cannot occur", never.to(device), (targets % 5 + BLOCK).to(device), None


def measure(device: str) -> dict[str, dict[str, float]]:
    """Case -> what -> error."""
    found = {}
    for name, z, targets, temperature in cases(device):
        exact = None if temperature is None else temperature.to(torch.float64)
        expected = reference.vocab_stats(z.to(torch.float64), targets, exact)
        actual = logprob_triton.vocab_stats(z, targets, temperature)
        stats, normalizer = combine(expected[None], exact)
        errors = {
            "max": tensor_error(actual[:, 0], expected[:, 0]),
            "target": tensor_error(actual[:, 3], expected[:, 3]),
        }
        (logprob, entropy), (peak, total, offset) = combine(actual[None], temperature)
        errors |= {
            "logprob": tensor_error(logprob, stats.logprob),
            "entropy": tensor_error(entropy, stats.entropy),
        }
        errors |= {
            "peak": tensor_error(peak, normalizer.peak),
            "total": tensor_error(total, normalizer.total),
        }
        errors["offset"] = tensor_error(offset, normalizer.offset)
        g, h = (
            torch.linspace(*ends, len(z), device=z.device) for ends in ((-1.0, 2.0), (0.5, -0.5))
        )
        same = tuple(x.to(torch.float32) for x in normalizer)  # both kernels see the same ones
        for entropy_gradient in (h, None):
            wide = z.to(torch.float64)
            want = reference.vocab_grad_(
                wide, targets, same, g.to(wide.dtype), entropy_gradient, exact
            )
            for dtype in (None, torch.bfloat16):
                spent, given = z.clone(), (targets, same, g, entropy_gradient, temperature)
                got = logprob_triton.vocab_grad_(spent, *given, dtype=dtype)
                assert got.data_ptr() == spent.data_ptr(), (
                    "the gradient lies elsewhere than in the logits' memory"
                )
                what = f"gradient{'' if entropy_gradient is h else ' without entropy'} {dtype or torch.float32}"
                errors[what] = tensor_error(got, want)
        found[name] = errors
    ops, stride = (
        (logprob_triton.vocab_stats, logprob_triton.vocab_grad_),
        4 if device == "cpu" else 1,
    )
    return found | {"large logits": gradient_errors(*ops, device, stride)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure("cpu")) + "\n")
