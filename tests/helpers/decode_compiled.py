"""The kernels of attention to a paged cache compiled for a GPU that need not be there: `python -m tests.helpers.decode_compiled`.

The interpreter takes Python that the compiler refuses. Writes the bytes of machine code, of memory shared by a program's
threads, and of what there is of that, of each case as one line of JSON.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.kernels import paged_attention_triton

HOPPER, ADA = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 89, 32)
SHARED = {HOPPER: 227 << 10, ADA: 99 << 10}  # bytes that a program's threads may share
TYPES = {"table": "*i64", "lengths": "*i64", "partial": "*fp32", "stride": "i32"}
KERNELS = (paged_attention_triton._split, paged_attention_triton._combine)


CASES = (
    *(
        (HOPPER, 128, 0, "*bf16"),
        (HOPPER, 192, 4096, "*bf16"),
        (HOPPER, 256, 0, "*fp32"),
        (HOPPER, 64, 0, "*fp32"),
    ),
    *((ADA, 128, 0, "*fp32"), (ADA, 256, 0, "*bf16"), (ADA, 256, 0, "*fp32")),
)


def compiled() -> dict[str, tuple[int, int, int]]:
    """Case -> bytes of machine code, of shared memory, and of what there is of that."""
    found = {}
    for target, dim, window, dtype in CASES:
        width = triton.next_power_of_2(dim)
        sizes = {
            "SHAPE": paged_attention_triton.Shape(7, 16, dim, width, 64, window),
            "DIM": dim,
            "WIDTH": width,
            "SPLITS": 4,
        }
        room = SHARED[target] * 3 // 4  # as `norm_triton.shared_bytes`
        stages = paged_attention_triton.stages_for(16, width, 4 if dtype == "*fp32" else 2, room)
        for kernel in KERNELS:
            names = kernel.arg_names
            signature = {n: "constexpr" if n in sizes else TYPES.get(n, dtype) for n in names}
            constants = {(i,): sizes[name] for i, name in enumerate(names) if name in sizes}
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, name in enumerate(names)
                if "*" in signature[name]
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
            options = {
                "num_warps": paged_attention_triton.warps_for(16, width),
                "num_stages": stages,
            }
            code = triton.compile(source, target=target, options=options)
            case = f"{kernel.__name__} {dim} {dtype} sm_{target.arch}"
            found[case] = (len(code.asm["cubin"]), code.metadata.shared, SHARED[target])
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compiled()) + "\n")
