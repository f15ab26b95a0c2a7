"""The Dockerfile names files that exist; its commands, run in a fresh environment, make a working program."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import dovetail

ROOT = Path(__file__).parents[2]
SECONDS = 1200  # for one command: pip downloads


class Instruction(NamedTuple):
    name: str
    text: str


def instructions() -> list[Instruction]:
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line]


def test_instructions_are_known_and_files_exist() -> None:
    found = instructions()
    assert [found[0].name, found[-1]] == ["FROM", Instruction("ENTRYPOINT", '["dovetail"]')]
    assert {each.name for each in found} == {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    copied = [source for each in found if each.name == "COPY" for source in each.text.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {"pyproject.toml", "README.md", "LICENSE", "docs", "src"} == set(copied), (
        "what the wheel is built from"
    )
    assert all((ROOT / source).exists() and f"!{source}" in ignored for source in copied)
    defaults = dict(each.text.split("=") for each in found if each.name == "ARG")
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(
        re.search(rf"^{extra} = \[", pyproject, re.M) for extra in defaults["EXTRAS"].split(",")
    )


@pytest.mark.soak
def test_its_commands_make_a_working_program(tmp_path: Path) -> None:
    """The CPU variant, with this environment's torch: the newest one takes gigabytes where the CPU index does not answer."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "constraints").write_text(f"torch=={version('torch')}\n")
    here = tmp_path
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "PATH": f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(tmp_path / "constraints"),
    }
    for each in instructions():
        if each.name == "ARG":
            name, default = each.text.split("=")
            environment[name] = "cpu" if name == "TORCH" else default
        elif each.name == "WORKDIR":
            here = tmp_path / each.text.strip("/")
            here.mkdir(exist_ok=True)
        elif each.name == "COPY":
            *sources, target = each.text.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, here / target)
                else:
                    shutil.copy(ROOT / source, here / target)
        elif each.name == "RUN":
            subprocess.run(
                ["sh", "-ec", each.text], cwd=here, env=environment, check=True, timeout=SECONDS
            )
    (entry,) = json.loads(instructions()[-1].text)
    for argv, words in (
        (["--version"], dovetail.__version__),
        (["doctor", "--device", "cpu"], "all well"),
    ):
        done = subprocess.run(
            [entry, *argv], cwd=here, env=environment, capture_output=True, text=True, check=True
        )
        assert words in done.stdout
