"""Reads from a torch-npu wheel the signatures of the operations that kernels/npu.py calls, for the tests' stand-in.

    python -m tools.npu_signatures torch_npu-VERSION.whl

writes tests/helpers/npu_signatures.json: the wheel's version and, of each operation, its schemas (one an overload), whether its
documentation names it, and whether it is differentiable. Schemas come from the wheel's list of native functions,
differentiability from the names of the backward nodes in its library. To get a wheel: pip download --no-deps torch-npu.
"""

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

OPERATIONS = (
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
)
FUNCTIONS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
DOCUMENTS = "torch_npu/_op_plugin_docs.py"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
TARGET = Path(__file__).parents[1] / "tests" / "helpers" / "npu_signatures.json"


def read_wheel(path: Path) -> dict[str, Any]:
    """What signatures.json holds. Raises KeyError where the wheel lacks one of the operations."""
    with zipfile.ZipFile(path) as wheel:
        functions = wheel.read(FUNCTIONS).decode()
        documents = wheel.read(DOCUMENTS).decode()
        library = wheel.read(LIBRARY)
    return {
        "torch_npu": path.name.split("-")[1],
        "operations": {
            name: {
                "schemas": _schemas(functions, name),
                "documented": f'"{name}"' in documents,
                "differentiable": _node(name).encode() in library,
            }
            for name in OPERATIONS
        },
    }


def _schemas(functions: str, name: str) -> list[str]:
    """Every overload of a function, but for those that write into what they are given."""
    found = re.findall(rf"^\s*(?:- )?func: ({name}(?:\.\w+)?\(.*)$", functions, flags=re.MULTILINE)
    schemas = sorted({schema for schema in found if not schema.startswith(f"{name}.out")})
    if not schemas:
        raise KeyError(f"{FUNCTIONS} has no {name}")
    return schemas


def _node(name: str) -> str:
    """The backward node that autograd makes of a differentiable function, as a whole name of the library's strings."""
    return "".join(word.capitalize() for word in name.split("_")) + "Backward0"


def main() -> int:
    """Write the file."""
    if len(sys.argv) != 2:
        print((__doc__ or "").strip())
        return 2
    found = read_wheel(Path(sys.argv[1]))
    TARGET.write_text(json.dumps(found, indent=2) + "\n", encoding="ascii")
    print(f"{TARGET}: torch_npu {found['torch_npu']}, {len(found['operations'])} operations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
