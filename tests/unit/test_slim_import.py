"""What the command line needs before it starts anything loads no torch."""

import subprocess
import sys

import pytest

MODULES = (
    "dovetail",
    "dovetail.config",
    "dovetail.layout",
    "dovetail.errors",
    "dovetail.arch.registry",
    "dovetail.build.layouts",
    "dovetail.pipeline.partition",
    "dovetail.pipeline.schedule",
    "dovetail.cli.main",
)


@pytest.mark.parametrize("module", MODULES)
def test_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", ["", "train", "score", "generate", "convert", "inspect", "doctor"])
def test_help_is_given_without_torch(command: str) -> None:
    code = f"""
import sys
from dovetail.cli.main import run_command
assert run_command({[command, "--help"] if command else ["--help"]}) == 0
sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: dovetail {command}".rstrip())


def test_public_names_load_on_first_use() -> None:
    code = """
import sys, dovetail as dt
assert dt.Layout(tp=2).tp == 2 and 'torch' not in sys.modules
assert all(hasattr(dt, name) for name in dir(dt)) and 'torch' in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
