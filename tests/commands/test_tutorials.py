"""Each tutorial runs as it is, and prints the lines that its prose shows, numbers apart. Its programs are forked."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.helpers.forked import popen
from tests.helpers.harness import template

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "examples" / "tutorials"
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?%?")


def without_numbers(line: str) -> str:
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def shown(text: str) -> list[str]:
    """Lines of output in the prose, up to `...`."""
    blocks = re.findall(r"# ```text\n(.*?)# ```", text, re.S)
    lines = [
        line.removeprefix("# ").partition("...")[0]
        for block in blocks
        for line in block.splitlines()
    ]
    return [without_numbers(line) for line in lines if line]


def forked(command: list[str], **options: Any) -> subprocess.Popen[str]:
    assert command[1:3] == ["-m", "dovetail"]
    return popen(template, command, **options)


@pytest.mark.parametrize(
    "name",
    [
        "first_run",
        "own_loop",
        *(
            pytest.param(n, marks=pytest.mark.soak)
            for n in ("own_reward", "image_model", "many_gpus")
        ),
    ],
)
def test_a_tutorial_runs_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = TUTORIALS / f"{name}.py"
    template()  # which is spawned: from here, and not from the tutorial
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(TUTORIALS), *sys.path])
    with mock.patch.dict(sys.modules), mock.patch.object(subprocess, "Popen", forked):
        runpy.run_path(str(path))
    if dist.is_initialized():  # an engine of its own has made it
        dist.destroy_process_group()
    printed = [without_numbers(line) for line in capfd.readouterr().out.splitlines()]
    expected = shown(path.read_text())
    assert len(expected) > 1
    assert [line for line in expected if not any(each.startswith(line) for each in printed)] == []
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]
