"""Installs the package into the environment that runs this script, with CPU or default wheels of torch.

`--torch cpu` adds PyTorch's CPU wheel index where pip alone would take a CUDA build. If that index does not answer,
the default build is installed and a line says so. Only the standard library is used: nothing is installed yet.
"""

import argparse
import json
import platform
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 10


def torch_requirement() -> str:
    """The torch line of pyproject.toml."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    return next(
        line.strip().strip('",') for line in text.splitlines() if line.strip().startswith('"torch>')
    )


def pip(*args: str, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    """Run this environment's pip; `quiet` captures what it says."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, capture_output=quiet, text=True, stdin=subprocess.DEVNULL)


def default_is_cpu(requirements: Sequence[str]) -> bool:
    """Whether pip on its own would install a CPU build here. Only Linux has CUDA builds on the default index."""
    if platform.system() != "Linux":
        return True
    asked = pip(
        "install",
        "--dry-run",
        "--no-deps",
        "--quiet",
        "--report",
        "-",
        torch_requirement(),
        *requirements,
    )
    if asked.returncode:
        return False
    chosen = json.loads(asked.stdout)[
        "install"
    ]  # empty: an installed torch already satisfies the requirement
    return all("+cpu" in item["metadata"]["version"] for item in chosen)


def index_answers() -> bool:
    """Whether PyTorch's CPU wheel index can be reached."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=PROBE_SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, OSError):
        return False


def index_options(choice: str, requirements: Sequence[str] = ()) -> list[str]:
    """The pip options that `--torch` stands for. requirements: more of torch."""
    if choice == "default" or default_is_cpu(requirements):
        return []
    if not index_answers():
        print(
            f"setup: {CPU_INDEX} does not answer; installing the default build of torch", flush=True
        )
        return []
    return ["--extra-index-url", CPU_INDEX]


def main() -> int:
    """Install; the exit code is pip's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch", choices=["cpu", "default"], default="default")
    parser.add_argument("package", help="for example .[test,lint]")
    parser.add_argument("requirement", nargs="*")
    args = parser.parse_args()
    print(f"setup: installing {args.package} (torch: {args.torch}) into {sys.prefix}", flush=True)
    torch = [each for each in args.requirement if each.startswith("torch")]
    wanted = ["--editable", args.package, *args.requirement]
    return pip(
        "install", "--quiet", *index_options(args.torch, torch), *wanted, quiet=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
