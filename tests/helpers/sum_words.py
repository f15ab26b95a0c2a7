"""Sums of weights by the Triton kernel and by the definition: JSON on stdout. Run with TRITON_INTERPRET=1, or on a GPU."""

import json

import torch

from dovetail.inference_servers import checksums as sums
from dovetail.kernels import checksums_triton


def pairs(device: str) -> list[tuple[int, int]]:
    found = []
    for count, first in ((1, 0), (7, 5), (2048, 0), (2049, 1), (5 * 2048 + 3, 1 << 33)):
        words = torch.randint(
            -(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(count)
        )
        expected = torch.tensor(count)
        sums.add_words(words, expected, first)
        got = torch.tensor(count, device=device)
        checksums_triton.add_words(words.to(device), got, first)
        found.append((int(got), int(expected)))
    return found


if __name__ == "__main__":
    print(json.dumps(pairs("cuda" if torch.cuda.is_available() else "cpu")))  # noqa: T201
