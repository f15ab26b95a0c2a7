"""The kernels of attention to a paged cache compiled for a GPU that need not be there: `python -m tests.unit.decode_compiled`.

The interpreter takes Python that the compiler refuses. Writes the bytes of machine code, and of memory shared by a
program's threads, of each case as one line of JSON.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.kernels import decode_triton

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {"table": "*i64", "lengths": "*i64", "found": "*fp32", "table_stride": "i32"}
KERNELS = (decode_triton._partial, decode_triton._join)


def compiled() -> dict[str, tuple[int, int]]:
    """Case -> bytes of machine code and of shared memory."""
    found = {}
    for dim, window, dtype in ((128, 0, "*bf16"), (192, 4096, "*bf16"), (256, 0, "*fp32"), (64, 0, "*fp32")):
        width = triton.next_power_of_2(dim)
        sizes = {"SHAPE": (7, 16, dim, width, 64, window), "DIM": dim, "WIDTH": width, "SPLITS": 4}
        for kernel in KERNELS:
            names = kernel.arg_names
            signature = {n: "constexpr" if n in sizes else TYPES.get(n, dtype) for n in names}
            constants = {(i,): sizes[name] for i, name in enumerate(names) if name in sizes}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {"num_warps": decode_triton.WARPS, "num_stages": decode_triton.STAGES}
            code = triton.compile(source, target=HOPPER, options=options)
            found[f"{kernel.__name__} {dim} {dtype}"] = (len(code.asm["cubin"]), code.metadata.shared)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compiled()) + "\n")
