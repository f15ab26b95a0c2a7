"""The numeric tests with the instructions of other processors: every file that uses a tolerance, in a program of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APART = ("tests/gpu/", "tests/npu/")  # devices of their own
PIECES = 12
OPTIONS = ("-q", "-x", "-m", "not gpu and not soak", "-p", "no:cacheprovider", "-p", "no:xdist")
TORCH = ("default", "avx2", "avx512")  # values of ATEN_CPU_CAPABILITY, each with those before it
NUMPY = "numpy without AVX"
NUMPYS = """
import json, numpy
print(json.dumps(numpy.show_config(mode="dicts")["SIMD Extensions"].get("found", [])))
"""
LIMITS = ("ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES")
# torch 2.11, where a processor has avx512_bf16: "pack_vnni2 is only supported when avx512 is"
FAILS_IN_TORCH = "tests/parity/test_half_precision.py::test_error_is_at_most_that_of_transformers"


def numeric_files() -> list[str]:
    """Test files that use a tolerance, from the repository's root."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    numeric = [
        path for path in files if "tests.helpers.tolerances" in path.read_text(encoding="utf-8")
    ]
    paths = [path.relative_to(ROOT).as_posix() for path in numeric]
    return [path for path in paths if not path.startswith(APART)]


def printed(program: str, **environment: str) -> str:
    """What a program prints without the limits of this process."""
    kept = {name: x for name, x in os.environ.items() if name not in LIMITS}
    command = [sys.executable, "-c", program]
    given = {**kept, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", params=[*TORCH, NUMPY])
def limits(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment that limits torch or numpy to some of this processor's instructions."""
    if request.param == NUMPY:
        own = json.loads(printed(NUMPYS))
        found = {"NPY_DISABLE_CPU_FEATURES": " ".join(own)}
        assert own and json.loads(printed(NUMPYS, **found)) == []
        return found
    own_of_torch = printed("import torch; print(torch.backends.cpu.get_cpu_capability())")
    own_of_torch = own_of_torch.strip().lower()
    if TORCH.index(request.param) > TORCH.index(own_of_torch):  # torch would take its word
        pytest.skip(f"this processor has no {request.param}, only {own_of_torch}")
    return {"ATEN_CPU_CAPABILITY": request.param}


@pytest.mark.soak
@pytest.mark.parametrize("piece", range(PIECES))
def test_numbers_hold_with_the_instructions_of_any_processor(
    limits: dict[str, str], piece: int
) -> None:
    files = numeric_files()[piece::PIECES]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *files]
    if "ATEN_CPU_CAPABILITY" in limits:
        command += ["--deselect", FAILS_IN_TORCH]
    kept = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**kept, **limits}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_every_folder_of_numbers_is_among_them() -> None:
    folders = {path.split("/")[1] for path in numeric_files()}
    assert {"commands", "distributed", "golden", "hf", "parity", "unit"} <= folders
    assert not {"gpu", "npu"} & folders
