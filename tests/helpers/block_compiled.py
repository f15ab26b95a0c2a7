"""The block's kernels compiled for a GPU that need not be there, as a process: `python -m tests.helpers.block_compiled`.

The interpreter takes Python that the compiler refuses. Writes what came of each as one line of JSON.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.kernels import (
    checksums_triton as sums,
    moe_triton as moe,
    norm_triton as block,
    paged_attention_triton as decode,
    quack_moe as mixture,
    rope_triton as qkv,
    sampling_triton as draw,
)

HOPPER = GPUTarget("cuda", 90, 32)
B, F, D, L, J, U = (
    "*bf16",
    "*fp32",
    "*fp64",
    "*i64",
    "*i32",
    "*u8",
)  # pointers to memory that begins at whole 16 bytes
N, S, E = "i32", "i32 by 16", "fp32"  # a count of tokens, a stride, an epsilon
(WIDE, FULL), (NARROW, HEAD) = block.tile_for(3584), block.tile_for(128)
QWEN = qkv.Shape(28, 4, 64)
ROUTED = moe.RowSize(2048, 8, moe.PIECE)
SAMPLED, SMALL = draw.Shape(38, 64, False), draw.Shape(1, 1, False)
WRITTEN = decode.EntryShape(64, 128, 128, 128, 128)
# Kernel, its warps, and its arguments: types, or what is compiled in.
CASES: list[tuple[Any, int, tuple[Any, ...]]] = [
    (block._norm, FULL, (B, B, B, (B, B, F), N, S, E, WIDE)),
    (block._norm, FULL, (B, None, B, (None, B, F), N, S, E, WIDE)),
    (block._norm_grad, FULL, ((B, B, F, B, B), B, F, N, S, WIDE, 3)),
    (block._norm_grad, FULL, ((B, B, F, B, None), B, F, N, S, WIDE, 1)),
    (block._columns, 4, (F, B, N, block.Tile(3584, 64, 16))),
    (block._swiglu, 4, (B, B, S, 18944, block.PIECE)),
    (block._swiglu_grad, 4, (B, B, B, (S, S), 768, block.PIECE)),
    (block._sum, 4, (B, B, S, S, 8, block.PIECE)),
    (block._sum, 4, (F, F, S, S, 2, block.PIECE)),
    (block._sum, 4, (F, F, S, S, 4, block.PIECE)),
    (qkv._rotate, HEAD, ((B, B, B, None, None), (B, B, None), N, (S, S), E, QWEN, NARROW)),
    (qkv._rotate, HEAD, ((B, B, B, B, B), (B, B, F), N, (S, S), E, QWEN, NARROW)),
    (
        qkv._rotate_grad,
        HEAD,
        ((B,) * 5, (None, None, None, None, S, S), (B, None), N, (S, S, S), QWEN, NARROW),
    ),
    (qkv._rotate_grad, HEAD, ((B,) * 5, (B, B, B, F, S, S), (B, F), N, (S, S, S), QWEN, NARROW)),
    (moe._permute, 4, (B, J, B, S, N, ROUTED)),
    (moe._unpermute, 4, (B, J, F, B, S, N, ROUTED)),
    (moe._unpermute, 4, (B, L, None, B, S, N, moe.RowSize(7168, 1, moe.PIECE))),
    (moe._unpermute_grad, 4, (B, B, J, F, (B, F), N, ROUTED)),
    (moe._count, 4, (L, J, N, N, N, moe.SORT_BLOCK)),
    (moe._place, 4, (L, L, J, N, N, N, moe.SORT_BLOCK)),
    (moe._top_k, 4, (F, L, N, block.Tile(128, 16, 128), 8)),
    (draw._piece_stats, draw.WARPS, (F, None, (F, J, D), (S, S), E)),
    (draw._piece_stats, draw.WARPS, (F, U, (F, J, D), (S, S), E)),
    (draw._sample, draw.WARPS, (F, None, (F, J, D), (L, L), D, (S, S), E, SAMPLED)),
    (
        draw._sample,
        draw.WARPS,
        (F, U, (F, J, D), (L, L), D, (S, S), E, SAMPLED._replace(greedy=True)),
    ),
    (draw._sample, draw.WARPS, (B, U, (F, J, D), (L, L), D, (S, S), E, SMALL)),
    (sums._add_words, 8, (L, L, N, N, sums.BLOCK)),
    (mixture._invert, 4, (J, F, J, F, N, N, 8, mixture.BLOCK)),
    (mixture._pick, 4, (J, F, F, N, N, mixture.BLOCK)),
    (decode._write, 1, ((B, B), L, L, (B, B), (S, S, S, S), WRITTEN)),
]


def compiled() -> list[tuple[str, int, int]]:
    """Kernel, bytes of machine code, bits of its widest access to memory."""
    found = []
    for kernel, warps, arguments in CASES:
        signature, constants, attributes = {}, {}, {}
        for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
            several = isinstance(value, tuple) and not parameter.is_constexpr
            types = []
            for path, one in (
                [((i, j), one) for j, one in enumerate(value)] if several else [((i,), value)]
            ):
                if not isinstance(one, str):
                    constants[path] = one
                elif one.startswith("*") or one == S:
                    attributes[path] = [["tt.divisibility", 16]]
                types.append(one.split()[0] if isinstance(one, str) else "constexpr")
            signature[parameter.name] = tuple(types) if several else types[0]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        code = triton.compile(
            source, target=HOPPER, options={"num_warps": warps, **block.EXACT}
        ).asm
        accesses = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", code["ptx"])
        widest = max(int(many or 1) * int(bits) for many, bits in accesses)
        found.append((kernel.__name__, len(code["cubin"]), widest))
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compiled()) + "\n")
