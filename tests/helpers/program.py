"""Runs dovetail as its users do, in this process, on the harness's ranks, or as a program; and makes what it needs."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml
from transformers import LlamaConfig

from dovetail.cli.main import run_command
from tests.helpers.forked import can_fork, popen
from tests.helpers.harness import run, template
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.tokenizers import make_tokenizer

VOCAB = 260  # of the byte-level tokenizer
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SECONDS = 300  # for one program; far more than it takes on an idle machine


class Ended(NamedTuple):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def well(self) -> bool:
        """Code 0, and nothing but the closing line of a command that wrote, and a note on more ranks than cores."""
        err = re.sub(r"dovetail: note: \d+ ranks share \d+ CPU cores; .*\n", "", self.err)
        return (
            self.code == 0
            and not err
            and re.fullmatch(r"(wrote \d+ .* to .*\n)?", self.out) is not None
        )


def here(*argv: object) -> Ended:
    """One command line in this process, as one rank."""
    with _captured() as (out, err):
        code = run_command([str(word) for word in argv])
    if dist.is_initialized():  # a failure leaves it
        dist.destroy_process_group()
    return Ended(code, out.getvalue(), err.getvalue())


def on_ranks(world: int, *argv: object) -> list[Ended]:
    """One command line on the harness's ranks, which must all end: what each rank would say if it spoke for all."""
    return run(world, _as_rank, [str(word) for word in argv])


def refused_on(world: int, *argv: object) -> str:
    """The message of a command line that every rank refuses alike; before the ranks have met, the first one speaks."""
    ended = [here(*argv)] if world == 1 else on_ranks(world, *argv)
    assert {each.code for each in ended} == {2}, ended
    assert {each.err for each in ended} <= {ended[0].err, ""}, ended
    return refusal(ended[0])


def refusal(ended: Ended) -> str:
    """The message of a command that ended as a user's mistake should: code 2, one message, no traceback."""
    return _only_message(ended, 2)


def failure(ended: Ended) -> str:
    """The message of a command that ended by a failure of the machine: code 1, one message, no traceback."""
    return _only_message(ended, 1)


def _only_message(ended: Ended, code: int) -> str:
    assert ended.code == code, ended
    assert ended.err.count("dovetail: ") == 1, ended.err
    assert ended.err.startswith("dovetail: "), ended.err
    assert "Traceback" not in ended.err, ended.err
    return ended.err.removeprefix("dovetail: ")


def start(
    *argv: object, env: Mapping[str, str] | None = None, executed: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """`python -m dovetail ...` as a program of its own. `env` adds to the environment.

    executed: by a new interpreter, which takes seconds; for tests of the start. Others are forked, see tests/helpers/forked.py.
    """
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    source = str(Path(__file__).parents[2] / "src")
    paths = [
        path for path in ((env or {}).get("PYTHONPATH"), source, clean.get("PYTHONPATH")) if path
    ]
    known = {**clean, "OMP_NUM_THREADS": "1", **(env or {}), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *options.pop("python", ["-m", "dovetail"]), *map(str, argv)]
    if not executed and can_fork(command, env, options):
        return popen(template, command, env=known, **options)
    pipe = subprocess.PIPE
    streams = {"stdout": pipe, "stderr": pipe, "text": True}
    return subprocess.Popen(command, **{**streams, **options}, env=known)


def program(*argv: object, env: Mapping[str, str] | None = None, **options: Any) -> Ended:
    """The same, to its end."""
    process = start(*argv, env=env, **options)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


def make_model(
    path: Path, *, dtype: torch.dtype = torch.float32, tokenizer: bool = True, **changes: Any
) -> Path:
    """A tiny Llama of random weights with a byte-level tokenizer, 260 words, and a chat template."""
    config = tiny_configs()["llama"]
    assert isinstance(config, LlamaConfig)
    vars(config).update({"vocab_size": VOCAB, "eos_token_id": 3, "bos_token_id": None, **changes})
    save_tiny(config, path, dtype)
    if tokenizer:
        make_tokenizer().save_pretrained(path)
    return path


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """JSON lines; text stays as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_recipe(path: Path, model: Path, data: Path, /, **sections: Any) -> Path:
    """A recipe of two steps of two rows; `sections` change or add keys. Its run_dir is `run` beside the recipe."""
    recipe: dict[str, Any] = {
        "model": {"path": str(model)},
        "algorithm": {"name": "sft"},
        "data": {"train": str(data)},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
        "optim": {"lr": 1e-3},
        "trainer": {"steps": 2, "prompts_per_step": 2, "tokens_per_batch": 256, "save_every": 0},
        "run_dir": str(path.parent / "run"),
    }
    for name, keys in sections.items():
        recipe[name] = {**recipe.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
    path.write_text(yaml.safe_dump(recipe))
    return path


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Standard output and error."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        yield out, err


def _as_rank(argv: list[str]) -> Ended:
    """The body of one rank: the environment that a launcher gives, around the group that the harness has made."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    try:
        with _captured() as (out, err):
            code = run_command(argv)
    finally:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    return Ended(code, out.getvalue(), err.getvalue())
