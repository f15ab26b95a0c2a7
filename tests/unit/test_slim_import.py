"""What the command line needs before it starts anything loads no torch; what computes loads none of the recipe's packages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "dovetail",
    "dovetail.recipe.schema",
    "dovetail.parallel.layout",
    "dovetail.errors",
    "dovetail.arch.registry",
    "dovetail.factory.layouts",
    "dovetail.pipeline.partition",
    "dovetail.pipeline.schedule",
    "dovetail.cli.main",
    "dovetail.cli.report",
    "dovetail.cli.rollouts",
)


WITHOUT_RECIPES = """
import importlib, pkgutil, sys
import dovetail.kernels, dovetail.rollout

missing = "pydantic", "pydantic_core", "rich", "dovetail.recipe.schema", "dovetail.recipe.yaml"  # huggingface_hub needs yaml
sys.modules.update(dict.fromkeys(missing))
rooms = dovetail.kernels, dovetail.rollout
found = [f"{room.__name__}.{module.name}" for room in rooms for module in pkgutil.iter_modules(room.__path__)]
found.remove("dovetail.kernels.quack_epilogue")  # needs cutlass, an extra
library = "factory.engine", "factory.sampler", "rl.losses", "rl.advantages", "rl.tasks", "run.trainer"
found += [f"dovetail.{name}" for name in library]
for name in (*found, "bench.rl_step", "bench.sampler", "bench.layouts", "tests.gpu.test_sampler"):
    importlib.import_module(name)
"""


def test_what_computes_needs_no_package_of_recipes() -> None:
    """The engine, the sampler, kernels, benchmarks and tests of GPUs, on a machine without pydantic, rich and PyYAML."""
    subprocess.run([sys.executable, "-c", WITHOUT_RECIPES], cwd=ROOT, check=True)


@pytest.mark.parametrize("module", MODULES)
def test_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "command", ["", "train", "score", "generate", "eval", "convert", "inspect", "report", "rollouts", "docs", "doctor"]
)
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
