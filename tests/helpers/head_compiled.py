"""The head's row kernels compiled for a GPU that need not be there, as a process: `python -m tests.helpers.head_compiled`.

The interpreter takes Python that the compiler refuses. Writes the bytes of machine code of each as one line of JSON.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.kernels import divergence_triton, logprob_triton, quack_head

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "z": "*fp32",
    "targets": "*i64",
    "inverse": "*fp32",
    "stats": "*fp32",
    "out": "*bf16",
    "rows": "*fp32",
}
POINTERS |= {"planes": "*fp32", "picked": "*fp32", "w": "*fp32", "sums": "*fp32", "labels": "*i64"}
SIZES = {
    "columns": 152064,
    "BLOCK": logprob_triton.COLUMNS,
    "ROWS": quack_head.ROWS,
    "TILES": quack_head.TILES,
}
SIZES["width"] = SIZES["columns"]


def compiled() -> dict[str, int]:
    """Kernel -> bytes of machine code."""
    found = {}
    kernels = [logprob_triton._row_stats, logprob_triton._row_grad, quack_head._combine]
    pairs = (divergence_triton._pair_sums, divergence_triton._pair_grad)
    for kernel, kind in [(kernel, 0) for kernel in kernels] + [
        (kernel, kind) for kernel in pairs for kind in range(3)
    ]:
        sizes = SIZES | {"KIND": kind}
        signature = {
            n: "constexpr" if n in sizes else POINTERS.get(n, "i32") for n in kernel.arg_names
        }
        constants = {(i,): sizes[name] for i, name in enumerate(kernel.arg_names) if name in sizes}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        code = triton.compile(
            source, target=HOPPER, options={"num_warps": logprob_triton.WARPS}
        ).asm
        found[f"{kernel.__name__}{kind or ''}"] = len(code["cubin"])
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compiled()) + "\n")
