"""How large the tiles of the block's kernels should be: python -m bench.block_sizes [--tokens 32768] [--device cuda]

Each kernel on shapes of Qwen2.5-7B and Qwen3-30B-A3B, with every size of its tile and number of warps, marked where it is the
one in use. On a CPU it needs TRITON_INTERPRET=1, and shows no more than that it runs.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path

import torch
import triton
from torch import Tensor

from bench.given import device as device_here, positive, run_main
from bench.harness import RESULTS, surroundings
from bench.timing import Run, milliseconds
from dovetail.kernels import moe_triton as moe, norm_triton as block, rope_triton as qkv

Launch = Callable[[int, int], object]  # of a size and of warps
Choice = tuple[
    str, Launch, list[tuple[int, int]], tuple[int, int]
]  # kernel, how to run it, what to try, what is in use
PIECES, WARPS = (512, 1024, 2048, 4096), (4, 8)


def block_launches(tokens: int, scale: int, device: torch.device) -> Iterator[Choice]:
    """Of a dense block. scale: by what widths are divided."""

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    width, ffn = 3584 // scale, 18944 // scale
    joint, half, wide = (
        drawn(tokens, 2 * ffn),
        drawn(tokens, ffn),
        torch.empty(tokens, 2 * ffn, device=device).bfloat16(),
    )

    def gate(piece: int, many: int) -> object:
        grid = (tokens * triton.cdiv(ffn, piece),)
        return block._swiglu_grad[grid](
            joint, half, wide, (2 * ffn, ffn), ffn, piece, num_warps=many, **block.EXACT
        )

    yield "swiglu, backward", gate, list(product(PIECES, WARPS)), (block.PIECE, 4)

    x, dy, ds, gain, inverse = (
        drawn(tokens, width),
        drawn(tokens, width),
        drawn(tokens, width),
        drawn(width),
        drawn(tokens),
    )
    size, used = block.tile_for(width)
    dx, inverse = torch.empty_like(x), inverse.to(torch.float32)

    def norm(programs: int, many: int) -> object:
        found = torch.empty(programs, width, device=device)
        given = (x, gain, inverse, dy, ds)
        ahead = block.stages(3, size, x)
        block._norm_grad[(programs,)](
            given, dx, found, tokens, width, size, ahead, num_warps=many, **block.EXACT
        )
        return block.column_sums(found, gain.dtype)

    yield (
        "norm, backward, by programs",
        norm,
        list(product((132, 264, 396, 528, 512, 1056), (4, 8, 16))),
        (block.PROGRAMS, used),
    )

    heads = drawn(tokens, 36, 128)
    tables, made = (
        (drawn(tokens, 64), drawn(tokens, 64)),
        (drawn(tokens, 28, 128), drawn(tokens, 4, 128)),
    )

    def turn(numbers: int, many: int) -> object:
        tile, shape = block.Tile(128, max(1, numbers // 128), 128), qkv.Shape(28, 4, 64)
        grid = (triton.cdiv(tokens * 32, tile.rows),)
        given = (heads, *tables, None, None)
        return qkv._rotate[grid](
            given,
            (*made, None),
            tokens,
            (36 * 128, 128),
            0.0,
            shape,
            tile,
            num_warps=many,
            **block.EXACT,
        )

    yield (
        "heads",
        turn,
        list(product((1024, 2048, 4096, 8192), WARPS)),
        (block.TILE_SIZE, block.tile_for(128)[1]),
    )


def expert_launches(tokens: int, device: torch.device) -> Iterator[Choice]:
    """Of experts."""
    copies, experts = 8, 128
    rows, chosen = (
        torch.randn(tokens, 2048, device=device),
        torch.rand(tokens, experts, device=device).topk(copies).indices,
    )
    rows = rows.to(torch.bfloat16)
    places, _ends = moe.sort_rows(chosen, experts)
    moved, weights = (
        rows.new_empty(tokens * copies, 2048),
        torch.rand(tokens, copies, device=device),
    )

    def permute_tokens(piece: int, many: int) -> object:
        grid = (tokens * triton.cdiv(2048, piece),)
        return moe._permute[grid](
            rows, places, moved, 2048, len(moved), moe.RowSize(2048, copies, piece), num_warps=many
        )

    def collect(piece: int, many: int) -> object:
        grid = (tokens * triton.cdiv(2048, piece),)
        size = moe.RowSize(2048, copies, piece)
        return moe._unpermute[grid](
            moved, places, weights, rows, 2048, len(moved), size, num_warps=many, **moe.EXACT
        )

    yield "rows to experts", permute_tokens, list(product(PIECES[:3], WARPS)), (moe.PIECE, 4)
    yield "rows back, weighted", collect, list(product(PIECES[:3], WARPS)), (moe.PIECE, 4)

    def sort(copies_each: int, many: int) -> object:
        blocks = triton.cdiv(chosen.numel(), copies_each)
        counts = torch.zeros((experts, blocks), dtype=torch.int32, device=device)
        size = (chosen.numel(), experts, blocks, copies_each)
        moe._count[(blocks,)](chosen, counts, *size, num_warps=many)
        ends = counts.view(-1).cumsum(0)
        return moe._place[(blocks,)](chosen, ends, places, *size, num_warps=many)

    yield "sort", sort, list(product((32, 64, 128), WARPS)), (moe.SORT_BLOCK, 4)


def main() -> None:
    """Print a line for every choice, and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.block_sizes", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=32768)
    parser.add_argument("--device", type=device_here, default="cuda")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--scale", type=positive, default=1, help="divides widths, to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "block_sizes_h200.json")
    given = parser.parse_args()
    device = torch.device(given.device)
    found = []
    every = chain(
        block_launches(given.tokens, given.scale, device), expert_launches(given.tokens, device)
    )
    for name, launch, choices, used in every:
        runs: dict[str, Run] = {
            f"{a} / {b}": (lambda a=a, b=b, launch=launch: launch(a, b)) for a, b in choices
        }
        for (a, b), time in zip(
            choices, milliseconds(runs, device, given.rounds).values(), strict=True
        ):
            found.append(
                {
                    "kernel": name,
                    "size": a,
                    "warps": b,
                    "in use": (a, b) == used,
                    "ms": round(time, 4),
                }
            )
            print(
                f"{name:28} {a:6} / {b:2} {time:8.4f} ms {'<- in use' if (a, b) == used else ''}",
                flush=True,
            )
    result = {"bench": "block_sizes", **surroundings(), "tokens": given.tokens, "results": found}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    run_main(main)
