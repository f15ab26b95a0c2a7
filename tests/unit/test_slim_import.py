"""What the command line needs before it starts anything loads no torch; what computes loads none of the recipe's packages."""

import os
import subprocess
import sys
from pathlib import Path

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
    "dovetail_tools.cli.report",
    "dovetail.cli.rollouts",
    "dovetail_tools.cli.plan",
    "dovetail.rl.asynchronous.staleness",
)


CORE = ("train", "score", "generate", "eval", "convert", "inspect", "rollouts", "serve")
TOOLS = ("report", "plan", "docs", "import-config", "doctor")
COMMANDS = (*CORE, *TOOLS)
NO_TORCH = f"""
import importlib, sys
from dovetail.cli.main import run_command
heavy = {{"torch", "transformers", "numpy", "safetensors", "huggingface_hub"}}
for given in (["--help"], *([name, "--help"] for name in {COMMANDS})):
    assert run_command(given) == 0
assert run_command(["score", "--modell", "x"]) == 2
assert not sys.modules.keys() & {{*heavy, "pydantic"}}, sys.modules.keys() & {{*heavy, "pydantic"}}
for name in {MODULES}:
    importlib.import_module(name)
    assert not sys.modules.keys() & {{"torch", "transformers"}}, name
"""


def test_without_the_tools_one_sentence_says_what_lacks(tmp_path: Path) -> None:
    (tmp_path / "dovetail").symlink_to(ROOT / "src/dovetail")
    start = [sys.executable, "-S", "-P", "-m", "dovetail"]

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(folder)}
        return subprocess.run([*start, *words], env=env, capture_output=True, text=True)

    assert "recipe" in run(ROOT / "src", "docs").stdout  # in a checkout that is not installed
    ended = run(tmp_path, "report", "runs/first")
    assert ended.returncode == 2
    assert ended.stderr == (
        "dovetail: dovetail report: this command is in the package dovetail_tools, "
        "which is not installed here; reinstall dovetail-rl\n"
    )
    shown = run(tmp_path, "--help").stdout
    assert "serve" in shown and "report" not in shown.partition("commands:")[2]


def test_help_and_what_checks_a_recipe_load_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("usage: ")] == [
        "[-h]",
        *COMMANDS,
    ]


WITHOUT_RECIPES = """
import gc, importlib, pkgutil, sys
gc.disable()  # a quarter of the time
import dovetail

assert dovetail.Layout(tp=2).tp == 2 and "torch" not in sys.modules
missing = "pydantic", "pydantic_core", "rich", "dovetail.recipe.schema", "dovetail.recipe.yaml"  # huggingface_hub needs yaml
assert not sys.modules.keys() & set(missing)
sys.modules.update(dict.fromkeys(missing))
import dovetail.kernels, dovetail.sampler, dovetail.inference_servers
rooms = dovetail.kernels, dovetail.sampler, dovetail.inference_servers
found = [f"{room.__name__}.{module.name}" for room in rooms for module in pkgutil.iter_modules(room.__path__)]
found.remove("dovetail.kernels.quack_epilogue")  # needs cutlass, an extra
library = "factory.engine", "factory.sampler", "rl.losses", "rl.advantages", "rl.tasks", "run.trainer"
found += [f"dovetail.{name}" for name in library]
for name in (*found, "bench.rl_step", "bench.sampler", "bench.layouts", "tests.gpu.test_sampler"):
    importlib.import_module(name)
for name in missing:
    del sys.modules[name]
assert all(hasattr(dovetail, name) for name in dir(dovetail))
"""


def test_what_computes_needs_no_package_of_recipes_and_public_names_load_on_first_use() -> None:
    """The engine, the sampler, kernels, benchmarks and tests of GPUs, on a machine without pydantic, rich and PyYAML."""
    subprocess.run([sys.executable, "-c", WITHOUT_RECIPES], cwd=ROOT, check=True)
