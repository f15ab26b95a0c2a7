"""Every command and snippet of README.md and docs/*.md is accepted; in soak they run to the end."""

import ast
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dovetail
from dovetail.cli.arguments import ON_RANKS, parse
from dovetail.cli.main import run_command
from dovetail.factory.inference_servers import TRANSFERS
from dovetail.launch.supervisor import _free_port as free_port
from dovetail.recipe.schema import load_recipe
from tests.helpers.harness import run
from tests.helpers.model_engine import ModelEngine
from tests.helpers.pages import ROOT, Block, blocks, make_folder, make_runs
from tests.helpers.processes import waited
from tests.helpers.program import program, start, write_rows

# What does not run here, by a part of its text, and why; arguments and keys are checked.
ELSEWHERE: Mapping[str, str] = {
    "make ": "`make quickstart` downloads a model, and `make test` runs this test",
    "pip install": "downloads packages",
    "examples.quickstart": "downloads a model",
    "vllm": "another project, with GPUs",
    "gpus_each: 1": "vLLM with GPUs",
    "start.count=2": "two GPUs",
    "localhost": "a judge or a reward server of another project",
    "wandb": "the extras wandb and tensorboard",
    "adamw8bit": "the extra torchao",
    "@COMMIT": "a dataset of the hub",
    "squares/": "images, and a model that sees",
    "kill -USR2": "the id of a process",
}
CONSOLE = [block for block in blocks("console") if block.commands]
RECIPES, SNIPPETS, ROWS = blocks("yaml"), blocks("python"), blocks("json")
SLOW = ("from_pretrained", "Trainer")
SHORT = [block for block in SNIPPETS if not any(word in block.text for word in SLOW)]
QUICKSTART = ROOT / "examples" / "recipes" / "quickstart_grpo.yaml"
Jobs = list[subprocess.Popen[str]]
PORT = "8000"  # of the pages
RESUMED = "resumed after step"
TRAINED = ("completion", "messages", "conversations", "instruction")  # columns of rows for sft


def elsewhere(text: str) -> bool:
    return any(part in text for part in ELSEWHERE)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of what the pages name, for one block."""
    return shutil.copytree(made, tmp_path / "pages", symlinks=True)


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The starts of ranks, none of which runs: commands run up to there, in a folder."""
    starts: list[object] = []

    def begin(*given: object) -> int:
        starts.append(given)
        return 0

    make_runs(folder)
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dovetail.cli.main.run_ranks", begin)
    monkeypatch.setattr("dovetail.cli.main._run_as_rank", begin)
    monkeypatch.setattr("dovetail.cli.preflight.connect", lambda *_: [])
    monkeypatch.setattr("dovetail.cli.preflight.try_reward", lambda *_: None)
    return starts


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_every_command_is_accepted(block: Block, started: list[object]) -> None:
    for words in block.commands:
        known = [word.replace("$HOME", str(Path.cwd())) for word in words if word != "&"]
        if known[0] == "dovetail":
            accept(known[1:], started)
        else:
            check_foreign(known)


def accept(argv: Sequence[str], started: list[object]) -> None:
    """Up to the start of ranks; of commands that take seconds, the arguments alone."""
    args = parse(argv)
    if args.command in ("serve", "doctor", "inspect", "plan"):
        return
    if args.command == "train":
        argv = [*argv, "run_dir=runs/new"]
    before = len(started)
    assert run_command(argv) == 0
    assert len(started) - before == (args.command in ON_RANKS)


def check_foreign(words: Sequence[str]) -> None:
    """Targets, extras, files and flags that are ours in the commands of other programs."""
    text = " ".join(words)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        path, _, extra = words[2].removesuffix("]").partition("[")
        assert (ROOT / path / "pyproject.toml").is_file()
        assert not extra or extra in extras
    elif "vllm serve" in text:
        transfer = json.loads(words[words.index("--weight-transfer-config") + 1])
        assert transfer["backend"] in TRANSFERS
    elif text.startswith("python -m examples.quickstart"):
        load_recipe(QUICKSTART, words[3:])
    elif words[0] == "curl":
        assert json.loads(words[words.index("-d") + 1])
    else:
        assert words[0] == "kill", text


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_every_recipe_is_accepted(block: Block, started: list[object]) -> None:
    expected = 0
    for text in block.recipes:
        path = Path("page.yaml")
        path.write_text(text)
        assert load_recipe(path).to_yaml()
        if not elsewhere(text):
            assert run_command(["train", str(path), "run_dir=runs/new"]) == 0
            expected += 1
        assert len(started) == expected


@pytest.mark.parametrize("block", ROWS, ids=str)
def test_every_row_is_accepted(block: Block, started: list[object]) -> None:
    rows = [json.loads(line) for line in block.text.splitlines()]
    for row in rows:
        if elsewhere(block.text):
            continue
        write_rows(Path("page.jsonl"), [row])
        algorithm = "sft" if any(name in row for name in TRAINED) else "grpo"
        words = ["data.train=page.jsonl", f"algorithm.name={algorithm}", "run_dir=runs/new"]
        assert run_command(["train", "recipe.yaml", *words]) == 0
    assert len(started) == (0 if elsewhere(block.text) else len(rows))


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_every_name_of_a_snippet_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "dt" or hasattr(dovetail, node.attr)


@pytest.mark.parametrize("block", SHORT, ids=str)
def test_short_snippets_run(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    exec(block.text, {})


def test_the_metric_of_the_page_takes_text_and_messages() -> None:
    (block,) = [each for each in SNIPPETS if "def distinct" in each.text]
    names: dict[str, Any] = {}
    exec(block.text, names)
    yes, no = ([{"role": "assistant", "content": word}] for word in ("yes", "no"))
    assert names["distinct"](completions=[yes, yes, no, no], id=[0, 0, 0, 1], answer=None) == 0.75
    assert names["distinct"](completions=["a", "a", "b", "b"], id=[0, 0, 0, 1]) == 0.75


@pytest.mark.soak
@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_every_command_runs(block: Block, folder: Path) -> None:
    make_runs(folder)
    with ExitStack() as stack:
        port = str(free_port())
        if "rollout.engines" in block.text and "dovetail serve" not in block.text:
            engine = ModelEngine(model=folder / "M", max_length=4096)
            port = stack.enter_context(engine).url.rpartition(":")[2]
        jobs: Jobs = []
        stack.callback(end_all, jobs)
        for words in block.commands:
            known = [_replaced(word, folder, port) for word in words]
            if words == ["kill", "-9", "%1"]:
                waited(lambda: any((folder / "runs" / "first" / "checkpoints").glob("step_*")))
                end_all(jobs)
            elif not elsewhere(" ".join(words)):
                run_words(known, block, folder, jobs)


def _replaced(word: str, folder: Path, port: str) -> str:
    word = word.replace("$HOME", str(folder)).replace(f":{PORT}", f":{port}")
    return port if word == PORT else word


def run_words(words: Sequence[str], block: Block, folder: Path, jobs: Jobs) -> None:
    """A command to its end; a server, or one with `&`, goes on and joins `jobs`."""
    if words[0] == "curl":
        subprocess.run(["curl", "--fail", *words[1:]], check=True, capture_output=True)
        return
    assert words[0] == "dovetail"
    resumes = RESUMED in block.text and words[-1] != "&"
    if words[1] == "train" and not resumes:
        shutil.rmtree(folder / "runs" / "first", ignore_errors=True)
    if words[1] == "serve" or words[-1] == "&":
        argv = [word for word in words[1:] if word != "&"]
        jobs.append(start(*argv, cwd=folder, start_new_session=True))
        if words[1] == "serve":
            port = int(words[words.index("--port") + 1])
            assert waited(lambda: answers(port))
        return
    starts_servers = any(word.startswith("rollout.start") for word in words)
    ended = program(*words[1:], cwd=folder, executed=starts_servers)
    assert ended.code == 0, ended.err
    if words[1] == "plan":
        assert ended.out.strip() == block.output.strip()


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def end_all(jobs: Jobs) -> None:
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    jobs.clear()


@pytest.mark.soak
@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_every_recipe_runs(block: Block, folder: Path) -> None:
    for text in block.recipes:
        if not elsewhere(text):
            (folder / "page.yaml").write_text(text)
            ended = program("train", "page.yaml", "--dry-run", "--device", "cpu", cwd=folder)
            assert ended.code == 0, ended.err


@pytest.mark.soak
@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_every_snippet_runs(block: Block, folder: Path) -> None:
    (folder / "snippet.py").write_text(block.text)
    on_two = "tp=2" in block.text or "recipe.yaml" in block.text
    run(2 if on_two else 1, run_snippet, folder)


def run_snippet(folder: Path) -> None:
    """The body of a rank."""
    with chdir(folder), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        runpy.run_path("snippet.py")
