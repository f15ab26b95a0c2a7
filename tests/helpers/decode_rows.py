"""Attention to a paged cache by triton against the reference in float64: errors by case, on a GPU or (TRITON_INTERPRET=1) a CPU.

As a process, `python -m tests.helpers.decode_rows`, it writes them as one line of JSON: triton decides when it is first
imported whether it interprets.
"""

import json
import sys
from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels import paged_attention_triton, reference
from tests.helpers.tolerances import tensor_error

CASES = {  # query heads, KV heads, head dim, page, window
    "grouped": (8, 2, 64, 16, None),
    "one KV head, window": (6, 1, 80, 64, 70),
    "no groups, window of 1": (2, 2, 128, 48, 1),
    "dim 192": (4, 2, 192, 32, 100),
    "17 queries a head": (17, 1, 64, 16, None),
    "dim 256": (2, 1, 256, 64, None),
}
LENGTHS = (1, 16, 63, 64, 65, 190)
POISON = float("nan")  # what nobody may read


def measure(device: str) -> dict[str, float]:
    """Case and dtype -> error. The interpreter is slow, so one of both in turn there; it multiplies the bits of bfloat16 as
    integers, hence float16.
    """
    found = {}
    for number, (name, (heads, groups, dim, page, window)) in enumerate(CASES.items()):
        both = (torch.float32, torch.float16 if device == "cpu" else torch.bfloat16)
        for dtype in both[number % 2 :][:1] if device == "cpu" else both:
            generator = torch.Generator().manual_seed(0)
            width = -(-max(LENGTHS) // page)
            needed = [-(-length // page) for length in LENGTHS]
            order = torch.randperm(1 + sum(needed), generator=generator).split([*needed, 1])
            table = torch.zeros(len(LENGTHS), width + 1, dtype=torch.int64)
            cache = torch.randn(2, 1 + sum(needed), groups, page, dim, generator=generator).to(
                dtype
            )
            for row, pages in enumerate(order[:-1]):
                table[row, : len(pages)] = pages
                cache[:, pages[-1], :, LENGTHS[row] - (len(pages) - 1) * page :] = POISON
            cache[:, order[-1]] = POISON
            q = torch.randn(len(LENGTHS), heads, dim, generator=generator).to(dtype)
            lengths = torch.tensor(LENGTHS)
            exact = (q.to(torch.float64), *cache.nan_to_num().to(torch.float64), table, lengths)
            expected = _call(reference.decode_attention, exact, window)
            given = tuple(x.to(device) for x in (q, *cache, table, lengths))
            actual = _call(paged_attention_triton.decode_attention, given, window).cpu()
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = tensor_error(actual, expected)
    return found


def written(device: str) -> dict[str, float]:
    """New entries by the kernel against the reference, of keys and values that are views, and of narrower values."""
    found = {}
    for dim, narrow in ((64, 64), (48, 32)):
        draw = torch.Generator().manual_seed(dim)
        held = torch.randn(2, 9, 3, 16, dim, generator=draw)
        joint = torch.randn(5, 3, 2 * dim, generator=draw)
        pages, offsets = torch.tensor([3, 1, 8, 2, 3]), torch.tensor([15, 0, 7, 3, 4])
        entries = [
            x.to(device) for x in (pages, offsets, joint[..., :dim], joint[..., dim : dim + narrow])
        ]
        expected, actual = held.to(device), held.to(device, copy=True)
        paged_attention_triton.write_entries(*actual, *entries)
        reference.write_entries(*expected, *entries)
        found[f"written {dim} and {narrow}, float32"] = float(not torch.equal(actual, expected))
    return found


def _call(op: Callable[..., Tensor], given: tuple[Tensor, ...], window: int | None) -> Tensor:
    return op(*given, window)


def whole_range(*bounds: tl.tensor | int) -> range:
    """The interpreter's scalars are arrays of one number, which NumPy 2.4 no longer takes for integers."""
    return range(
        *(bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in bounds)
    )


if __name__ == "__main__":
    vars(paged_attention_triton)["range"] = whole_range
    sys.stdout.write(json.dumps(measure("cpu") | written("cpu")) + "\n")
