"""No file of a model, checkpoint or data directory is executed or unpickled, unless --trust-remote-code says so."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.hub import HF_MODULES_CACHE

from dovetail.factory.tokenizer import LOCK
from tests.helpers.program import here, on_ranks, program, refusal, write_recipe, write_rows

TRAP = "import pathlib\npathlib.Path({sentinel!r}).write_text('executed')\n"
TOKENIZER = "from transformers import PreTrainedTokenizerFast\nclass Trap(PreTrainedTokenizerFast):\n    pass\n"
WORDS = """
import fcntl
with open({lock!r}, "a") as lock, open({held!r}, "w") as held:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.write("held")
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer
class Words(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}
    def __init__(self, vocab_file, **options):
        self.words = Tokenizer.from_file(vocab_file)
        super().__init__(**options)
    @property
    def vocab_size(self):
        return self.words.get_vocab_size()
    def get_vocab(self):
        return self.words.get_vocab()
    def _tokenize(self, text, **_):
        return self.words.encode(text, add_special_tokens=False).tokens
    def _convert_token_to_id(self, token):
        return self.words.token_to_id(token)
    def _convert_id_to_token(self, index):
        return self.words.id_to_token(index)
"""


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.sentinel, "unpickled")


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "sentinel"


@pytest.fixture
def trapped(model: Path, tmp_path: Path, sentinel: Path) -> Path:
    """A good model with code in every place where a loader could fall for it."""
    path = Path(shutil.copytree(model, tmp_path / "model"))
    code = TRAP.format(sentinel=str(sentinel))
    names = (
        "modeling_trap",
        "configuration_trap",
        "tokenization_trap",
        "conftest",
        "sitecustomize",
        "torch",
        "yaml",
    )
    for name in (*names, "json", "reward", "setup", "__init__"):
        (path / f"{name}.py").write_text(code + TOKENIZER)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"):
        (path / name).write_bytes(pickle.dumps(Bomb(sentinel)))
    maps = {
        "config.json": {
            "AutoConfig": "configuration_trap.Trap",
            "AutoModelForCausalLM": "modeling_trap.Trap",
            "AutoTokenizer": ["tokenization_trap.Trap", "tokenization_trap.Trap"],
        },
        "tokenizer_config.json": {"AutoTokenizer": [None, "tokenization_trap.Trap"]},
        "generation_config.json": {"AutoConfig": "configuration_trap.Trap"},
    }
    for name, auto_map in maps.items():
        given = json.loads((path / name).read_text()) | {"auto_map": auto_map}
        (path / name).write_text(json.dumps(given))
    return path


def test_no_command_executes_what_lies_in_the_model(
    trapped: Path, sentinel: Path, tmp_path: Path
) -> None:
    text = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd", "answer": "x"}]
    )
    ids = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6]}])
    recipe = write_recipe(tmp_path / "r.yaml", trapped, text, algorithm={"name": "grpo"})
    for argv in (
        ["score", "--model", trapped, "--data", text, "--out", tmp_path / "o"],
        ["score", "--model", trapped, "--data", ids, "--out", tmp_path / "o"],
        ["generate", "--model", trapped, "--data", text, "--out", tmp_path / "o"],
        ["train", recipe],
        ["convert", trapped, tmp_path / "cut", "--to", "sharded"],
        ["convert", tmp_path / "cut", tmp_path / "hf", "--to", "hf"],
        ["inspect", tmp_path / "cut", "--verify"],
    ):
        ended = here(*argv)
        assert ended.code in (0, 2), ended
        assert not sentinel.exists(), f"{argv[0]} executed code of the model"
    assert here("score", "--model", trapped, "--data", ids, "--out", tmp_path / "o").code == 0, (
        "ids need no tokenizer"
    )
    assert {ended.code for ended in on_ranks(2, "train", recipe, f"run_dir={tmp_path}/b")} <= {0, 2}
    assert not sentinel.exists()


def test_a_tokenizer_that_only_its_own_code_knows_is_refused_and_runs_with_the_flag(
    trapped: Path, sentinel: Path, tmp_path: Path
) -> None:
    """The second half shows that the trap works, so the first half can fail."""
    named = json.loads((trapped / "tokenizer_config.json").read_text())
    (trapped / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "Trap"}))
    for name in ("torch", "yaml", "json", "sitecustomize"):
        (trapped / f"{name}.py").unlink()
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    argv = ["score", "--model", trapped, "--data", rows, "--out", tmp_path / "o"]
    ended = here(*argv)
    assert not sentinel.exists()
    if ended.code:
        assert "its tokenizer does not load" in refusal(ended)
    ended = here(*argv, "--trust-remote-code")
    assert sentinel.read_text() == "executed", ended


def test_a_tokenizer_whose_words_only_its_own_code_reads(model: Path, tmp_path: Path) -> None:
    """As Moonlight's and Kimi's, which come without tokenizer.json. Ranks import it one after the other."""
    path = Path(shutil.copytree(model, tmp_path / "model"))
    (path / "tokenizer.json").rename(path / "tiktoken.model")
    words = WORDS.format(lock=str(Path(HF_MODULES_CACHE) / LOCK), held=str(tmp_path / "held"))
    (path / "tokenization_words.py").write_text(words)
    named = {
        "tokenizer_class": "Words",
        "auto_map": {"AutoTokenizer": ["tokenization_words.Words", None]},
    }
    (path / "tokenizer_config.json").write_text(json.dumps({**named, "eos_token": "<|im_end|>"}))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    argv = ["score", "--data", rows, "--out", tmp_path / "o"]
    assert "its tokenizer does not load" in refusal(here(*argv, "--model", path))
    assert here(*argv, "--model", path, "--trust-remote-code").well
    assert (tmp_path / "held").read_text() == "held"
    found = (tmp_path / "o").read_text()
    assert here(*argv, "--model", model).code == 0
    assert found == (tmp_path / "o").read_text()


def test_pickles_alone_are_refused_unread(trapped: Path, sentinel: Path, tmp_path: Path) -> None:
    (trapped / "model.safetensors").unlink()
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
    told = refusal(
        here(
            "score",
            "--model",
            trapped,
            "--data",
            rows,
            "--out",
            tmp_path / "o",
            "--trust-remote-code",
        )
    )
    assert "has only pickled weights (model.pkl, optimizer.pt, pytorch_model.bin)" in told
    assert not sentinel.exists()


STARTS = """
import subprocess, sys
from unittest import mock
from dovetail.cli.main import run_command
from dovetail.rewards.runner import RewardRunner
with mock.patch("dovetail.cli.main.run_ranks", return_value=0) as started:
    assert run_command(["train", sys.argv[1], "--layout", "tp=2"]) == 0
program = started.call_args.args[0]
subprocess.run([*program[:program.index("train")], "--help"], check=True)
RewardRunner("exact_match").close()
"""


def test_ranks_and_rewards_start_without_the_working_directory(
    trapped: Path, sentinel: Path, tmp_path: Path
) -> None:
    """As below, but that the program by which ranks start ends with its help."""
    recipe = recipe_in(trapped, tmp_path)
    ended = program("-c", STARTS, recipe, cwd=trapped, python=["-P"])
    assert (ended.code, ended.err) == (0, ""), ended
    assert "usage: dovetail" in ended.out
    assert not sentinel.exists()


@pytest.mark.soak  # imports torch three times
def test_ranks_and_rewards_import_nothing_from_the_working_directory(
    trapped: Path, sentinel: Path, tmp_path: Path
) -> None:
    """Whoever stands in a model's directory must not run its json.py: as the installed program, on two ranks."""
    recipe = recipe_in(trapped, tmp_path)
    ended = program(
        "train", recipe, "--layout", "tp=2", cwd=trapped, python=["-P", "-m", "dovetail"]
    )
    assert (ended.code, ended.err) == (0, ""), ended
    assert not sentinel.exists()


def recipe_in(trapped: Path, tmp_path: Path) -> Path:
    """One step of GRPO with that model, which asks for no code any more."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "x"}] * 2)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        given = json.loads((trapped / name).read_text())
        del given["auto_map"]
        (trapped / name).write_text(json.dumps(given))
    return write_recipe(
        tmp_path / "r.yaml", trapped, rows, algorithm={"name": "grpo"}, trainer={"steps": 1}
    )


TRAPS = (
    ".metadata", "pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "state.pkl",
    "__0_0.distcp", "common.pt", "custom_code.py", "conftest.py", "sitecustomize.py", "torch.py", "json.py", "x.pth",
    "chat_template.jinja", "trainer_state.json", "model.safetensors.index.json", "events.out.tfevents.1", "latest",
)  # fmt: skip
SSTI = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}"
PLACES = ("model", "step", "run")


def lay(trap: str, folder: Path, sentinel: Path) -> None:
    """Code under a name that some loader runs, reads or unpickles; where a sound file has the name, it stays as it was."""
    path = folder / trap
    if path.is_symlink() or (path.exists() and trap != "chat_template.jinja"):
        return
    if trap.endswith(".py"):
        path.write_text(TRAP.format(sentinel=str(sentinel)) + TOKENIZER)
    elif trap.endswith(".jinja"):
        path.write_text(SSTI)
    elif trap == "x.pth":
        path.write_text(f"import pathlib; pathlib.Path({str(sentinel)!r}).write_text('executed')")
    else:
        path.write_bytes(pickle.dumps(Bomb(sentinel)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A run that saved a step, and the model and rows that it began with."""
    base = tmp_path_factory.mktemp("saved")
    shutil.copytree(model, base / "model")
    rows = write_rows(base / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    trainer = {"save_every": 1, "steps": 1, "prompts_per_step": 1}
    assert (
        here("train", write_recipe(base / "r.yaml", base / "model", rows, trainer=trainer)).code
        == 0
    )
    shutil.rmtree(base / "run/hf")
    return base


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "trap",
    [
        pytest.param(trap, marks=[pytest.mark.soak] if number % 5 else [])
        for number, trap in enumerate(TRAPS)
    ],
)
def test_sixty_hostile_directories(
    trap: str, place: str, saved: Path, sentinel: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(saved, tmp_path / "job", symlinks=True))
    recipe = base / "r.yaml"
    recipe.write_text(recipe.read_text().replace(str(saved), str(base)))
    (step,) = (base / "run/checkpoints").glob("step_000001.*")
    lay(
        trap,
        {"model": base / "model", "step": step, "run": base / "run/checkpoints"}[place],
        sentinel,
    )
    for argv in (
        ["train", recipe, "--dry-run"],
        ["inspect", step, "--verify"],
        [
            "score",
            "--model",
            base / "model",
            "--data",
            base / "rows.jsonl",
            "--out",
            tmp_path / "o",
        ],
    ):
        ended = here(*argv)
        assert ended.code in (0, 2), ended
        assert not sentinel.exists(), argv[0]


def test_recipes_execute_no_yaml_tags(sentinel: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: !!python/object/apply:os.system ['touch {sentinel}']\n")
    assert "is not valid YAML" in refusal(here("train", recipe))
    given = f"model.path=!!python/object/apply:os.system ['touch {sentinel}']"
    assert "is not valid YAML" in refusal(here("train", recipe, given))
    assert not sentinel.exists()
