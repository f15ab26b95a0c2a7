"""What `pip install` gets: the wheel built from the sdist holds the program, its pages, and nothing of the checkout."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import dovetail
from dovetail.cli.main import run_command

ROOT = Path(__file__).parents[2]
PAGE = re.compile(r"dovetail docs ([\w-]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    hooks, folder = pytest.importorskip("hatchling.build"), tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with tarfile.open(folder / hooks.build_sdist(str(folder))) as archive:
            archive.extractall(folder, filter="data")
        patch.chdir(folder / f"dovetail_rl-{dovetail.__version__}")
        with zipfile.ZipFile(folder / hooks.build_wheel(str(folder))) as archive:
            archive.extractall(folder / "site")
    return folder / "site"


def installed(site: Path, *commands: Sequence[str]) -> list[str]:
    """What each command line prints if the program is the wheel's, in one process and a folder that is not the checkout."""
    start = f"""
import sys
sys.path.insert(0, {str(site)!r})
from dovetail.cli.main import run_command
for argv in {commands}:
    assert run_command(argv) == 0, argv
    print(end="\\0")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", start]
    return subprocess.run(
        command, cwd=site, env=environment, capture_output=True, text=True, check=True
    ).stdout.split("\0")


def test_the_installed_program_shows_version_help_and_pages(site: Path) -> None:
    (info,) = site.glob("*.dist-info")
    metadata = email.message_from_string((info / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"]) == ("dovetail-rl", dovetail.__version__)
    assert "dovetail = dovetail.cli.main:main" in (info / "entry_points.txt").read_text()
    assert {path.name for path in site.iterdir()} == {"dovetail", "dovetail_tools", info.name}
    parts = (site / "dovetail_tools" / "report").glob("report.*")
    assert {path.suffix for path in parts} == {".css", ".html", ".js"}
    pages = ("recipe", "contract")
    version, text, *shown, _ = installed(
        site, ["--version"], ["train", "--help"], *(["docs", name] for name in pages)
    )
    assert version == f"dovetail {dovetail.__version__}\n"
    assert tuple(PAGE.findall(text)) == pages
    assert shown == [(ROOT / "docs" / f"{name}.md").read_text() for name in pages]


def test_pages_that_messages_name_exist() -> None:
    named = {
        name for path in (ROOT / "src").rglob("*.py") for name in PAGE.findall(path.read_text())
    }
    assert named >= {"contract", "data", "recipe"}
    assert named <= {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_an_unknown_page_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["docs"]) == 0
    assert re.search(r"^recipe +The keys of a recipe$", capsys.readouterr().out, re.M)
    assert run_command(["docs", "docs/legend.md"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "legend.md").read_text()
    assert run_command(["docs", "recipes"]) == 2
    assert "there is no page 'recipes'; did you mean recipe? (pages: " in capsys.readouterr().err
