"""What the command line needs before it starts anything loads no torch."""

import subprocess
import sys

import pytest

MODULES = ("dovetail", "dovetail.config", "dovetail.layout", "dovetail.errors", "dovetail.arch.spec")


@pytest.mark.parametrize("module", MODULES)
def test_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
