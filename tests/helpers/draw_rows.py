"""Draws by triton against `rollout.draw`, by case, on a GPU or (TRITON_INTERPRET=1) a CPU.

As a process, `python -m tests.helpers.draw_rows`, it writes how they differ as one line of JSON.
"""

import json
import sys

import torch
import triton
import triton.language as tl

from dovetail.kernels import sampling_triton
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.sampling import bits_at, draw, mask_of

COLUMNS = (
    1,
    5,
    256,
    257,
    4096,
    9001,
)  # within a block, at its edges, at those of a piece, and several pieces


def measure(device: str) -> dict[str, tuple[int, float]]:
    """Case -> how many ids are others, and how far log-probs are from those of float64 at most."""
    found, rows = {}, 4 if device == "cpu" else 7
    for columns in COLUMNS:
        for temperature in (0.0, 1.0, 0.7):
            for name, banned in (
                ("all", ()),
                ("but two", (0, 3)),
                ("two alone", tuple(range(2, columns))),
            ):
                few = device == "cpu" and (bool(banned) or columns > 300)  # the interpreter is slow
                if (
                    (banned and columns == 1)
                    or (few and temperature == 1.0)
                    or (few and columns > 300 and not temperature)
                ):
                    continue
                made = torch.Generator().manual_seed(columns)
                z = torch.randn(rows, columns + 3, generator=made)[:, :columns] * 4
                if columns > 300:
                    z[1, 100:300], z[2, 50], z[2, 260] = (
                        -torch.inf,
                        40.0,
                        40.0,
                    )  # a hole, and two alike
                    z[3, 0] = 200.0  # so likely that all else is 0, and perhaps not to be drawn
                streams = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=made)
                positions = torch.arange(rows) * 1000
                params = SamplingParams(temperature=temperature, banned_ids=banned)
                uniforms = bits_at(streams, positions).to(torch.float64) * 2.0**-53
                ids, _ = draw(z, uniforms, params)
                _, exact = draw(z.to(torch.float64), uniforms, params)
                mask = mask_of(torch.tensor(banned), columns).to(device) if banned else None
                logits, *noise = (x.to(device) for x in (z, streams, positions))
                told = sampling_triton.draw(logits, noise[0], noise[1], temperature, mask).cpu()
                far = float(((told[1] - exact).abs() / exact.abs().clamp(min=1)).max())
                found[f"{columns}, {temperature}, {name}"] = int((told[0] != ids).sum()), far
    return found


def odd(device: str) -> dict[str, bool]:
    """Numbers that are not any, no rows at all, halves, and the noise itself."""
    z = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).to(device)
    streams, positions = (
        torch.tensor([5, -6, 2**62]).to(device),
        torch.tensor([0, 1, 2**40]).to(device),
    )
    alone = sampling_triton.draw(z, streams, positions, 1.0, None)
    z[1, 650] = torch.nan
    told = sampling_triton.draw(z, streams, positions, 1.0, None)
    half = sampling_triton.draw(z.half(), streams, positions, 1.0, None)
    numbers = torch.empty(3, dtype=torch.float64, device=device)
    _numbers[(3,)](streams, positions, numbers)
    return {
        "NaN is told": bool(told[1, 1].isnan()) and 0 <= float(told[0, 1]) < 700,
        "of its row alone": torch.equal(told[:, ::2], alone[:, ::2]),
        "halves": torch.equal(
            half[:, ::2],
            sampling_triton.draw(z.half().float(), streams, positions, 1.0, None)[:, ::2],
        ),
        "no rows": sampling_triton.draw(z[:0], streams[:0], positions[:0], 1.0, None).shape
        == (2, 0),
        "noise": torch.equal(numbers, bits_at(streams, positions).to(torch.float64) * 2.0**-53),
    }


@triton.jit
def _numbers(streams: tl.tensor, positions: tl.tensor, out: tl.tensor) -> None:
    i = tl.program_id(0)
    tl.store(out + i, sampling_triton._uniform(tl.load(streams + i), tl.load(positions + i)))


if __name__ == "__main__":
    sys.stdout.write(json.dumps([measure("cpu"), odd("cpu")]) + "\n")
