"""Every key of a recipe arrives where it is used: one table of all keys, with a value that is not the default of any.

The parts that a run is built from are stand-ins that keep what they are given, so no model is made.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Qwen3MoeConfig

from dovetail.factory import models, rewards, sampling, setup, tasks, tokenizer
from dovetail.factory.run import Run, build_run
from dovetail.factory.sampler import backend_layout
from dovetail.factory.setup import Start, prepare
from dovetail.inference_servers.fleet import Replica
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.protocol import ServerInfo
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe, known_keys, make_recipe
from dovetail.run.directory import RunDirectory
from examples.quickstart.scratch import character_tokenizer
from tests.helpers.wired_keys import RANKS, TABLE
from tests.helpers.wiring import (
    DISTILLED,
    LAYOUT,
    PAIRED,
    PAIRS,
    ROWS,
    SAME,
    TOO_LONG,
    WIRED,
    Leaf,
    of_folder,
)

BY_PROPERTY = {  # of its section
    "critic_warmup": "steps_without_policy",
    "drop_zero_std_groups": "drops_groups",
    "max_num_gen_batches": "max_generations",
}
SOURCE = Path(tasks.__file__).parents[1]
ALGORITHMS = (
    "ppo",
    "grpo",
    "rloo",
    "sft",
    "reinforce_plus_plus",
    "rloo-import",
    "rloo-model",
    "rloo-server",
    "grpo-engines",
    "grpo-start",
    "grpo-async",
    *PAIRED,
    *DISTILLED,
)  # a reward of a kind each


def make_mesh(layout: Layout, device: torch.device, *, timeout: timedelta) -> Mesh:
    """The mesh of one process that says it is of some layout."""
    return replace(Mesh.solo(device), layout=layout, timeout=timeout)


def make_engine(
    source: Any, mesh: Mesh, dtype: torch.dtype, head: str, options: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        source=source,
        mesh=mesh,
        dtype=dtype,
        head=head,
        options=options,
        origin=SimpleNamespace(auxiliary={}),
    )


def load_tokenizer(source: Any, *, trust_remote_code: bool) -> Any:
    loaded: Any = tokenizer.load_tokenizer(source, trust_remote_code=trust_remote_code)
    loaded.trusted = trust_remote_code
    return loaded


def reward_runner(name: str | None, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, close=lambda: None, **given)


def connect(recipe: Recipe, urls: Seq[str], *_: object, **__: object) -> list[Replica]:
    """Engines that nobody asks."""
    server = ServerInfo(
        kind="vllm",
        model="m",
        version="",
        max_length=None,
        log_probs="raw",
        transfer="dovetail_file",
    )
    return [Replica(Client(url), server) for url in urls] if recipe.rollout.engines else []


def recipe_of(folder: Path, algorithm: str) -> dict[str, Any]:
    """All values of the table for one algorithm, as a recipe's nested sections."""
    given: dict[str, Any] = {}
    needed: dict[str, Any] = {
        "model.path": "FOLDER/policy",
        "data.train": f"FOLDER/{'pairs' if algorithm in PAIRED else 'train'}.jsonl",
        "run_dir": "FOLDER/run",
    }
    needed |= {
        "algorithm.name": algorithm.partition("-")[0],
        "data.overlong_rows": "drop",
        "trainer.tokens_per_batch": 40,
    }
    needed |= {"rollout.max_new_tokens": 9}
    needed |= (
        {"algorithm.correction.ratio": "none"} if algorithm == "grpo-engines" else {}
    )  # goes with the penalty
    for key, value in [
        *needed.items(),
        *((leaf.key, leaf.value) for leaf in TABLE if leaf.algorithm == algorithm),
    ]:
        *path, last = key.split(".")
        section = given
        for name in path:
            section = section.setdefault(name, {})
        section[last] = of_folder(value, folder)
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wiring")
    tokenizer = character_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=8, num_experts=8, moe_intermediate_size=16, intermediate_size=32, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    for name in ("policy", "critic", "reference"):
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "wired.py").write_text(WIRED)
    (folder / "template.jinja").write_text(
        "{{ mark }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "__init__.py").touch()
    for name, rows in {"train": [*ROWS, TOO_LONG], "eval": ROWS[3:4], "pairs": PAIRS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Iterator[dict[str, Run]]:
    """The job of each algorithm."""
    asked: list[Layout] = []

    def keep(source: Any, layout: Layout, backend: Any) -> Layout:
        asked.append(layout)
        return backend_layout(source, layout, backend)

    def make_sampler(
        source: Any, mesh: Mesh, dtype: torch.dtype, backend: str, options: Any
    ) -> SimpleNamespace:
        given = {
            "source": source,
            "mesh": mesh,
            "dtype": dtype,
            "backend": backend,
            "options": options,
        }
        return SimpleNamespace(**given, asked=asked[-1])

    stand_ins: dict[str, Any] = {
        "num_ranks": lambda: RANKS,
        "make_mesh": make_mesh,
        "load_tokenizer": load_tokenizer,
        "make_engine": make_engine,
        "make_sampler": make_sampler,
        "backend_layout": keep,
        "connect": connect,
        "started_servers": lambda: ("http://started:1",),
    }
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # where a package named tensorboard is
        for module in (models, sampling, setup):
            made = {name: made for name, made in stand_ins.items() if name in vars(module)}
            stack.enter_context(mock.patch.multiple(module, **made))
        teacher = SimpleNamespace(of=lambda engine, _: SimpleNamespace(engine=engine))
        stack.enter_context(mock.patch.object(tasks, "Teacher", teacher))
        stack.enter_context(mock.patch.object(rewards, "RewardRunner", reward_runner))
        stack.enter_context(mock.patch.object(RunDirectory, "check_space"))
        found = {}
        for name in ALGORITHMS:
            recipe = make_recipe(recipe_of(folder, name))
            found[name] = build_run(prepare(recipe, Start(torch.device("cpu"), folder)))
            stack.callback(found[name].close)
        yield found


@pytest.mark.parametrize("leaf", TABLE, ids=lambda leaf: f"{leaf.key}-{leaf.algorithm}")
def test_a_key_arrives_where_it_is_used(leaf: Leaf, jobs: Mapping[str, Run], folder: Path) -> None:
    expected = of_folder(leaf.value if leaf.expected is SAME else leaf.expected, folder)
    assert leaf.arrived(jobs[leaf.algorithm]) == expected, (
        f"{leaf.key} of the recipe did not arrive"
    )


def leaves() -> list[str]:
    """Every key of a recipe that is no section."""
    known = known_keys()
    return [key for key in known if not any(other.startswith(f"{key}.") for other in known)]


def test_every_key_is_in_the_table_with_a_value_that_is_not_its_default() -> None:
    known = known_keys()
    for key in leaves():
        rows = [leaf for leaf in TABLE if leaf.key == key]
        assert rows, (
            f"{key} is a key of the recipe, and {Path(__file__).name} has no row for it. Add to its TABLE\n"
            f'    Leaf("{key}", VALUE, part("PATH")),\n'
            "VALUE: one that is not the default. PATH: the attribute of the built Run that holds it, such as "
            "recipe.trainer.steps or task.policy.options.recompute. Where no part of the job holds it, nothing reads the "
            "key: take it out."
        )
        for leaf in rows:
            defaults = known[key].defaults
            default = (
                "grpo"
                if key == "algorithm.name"
                else defaults.get("", defaults.get(leaf.algorithm))
            )
            assert leaf.value != default, f"{leaf} has the default, which would arrive by itself"


def test_the_table_has_no_key_that_recipes_lack() -> None:
    assert {leaf.key for leaf in TABLE} <= set(known_keys())


def test_every_key_is_read_outside_the_recipe() -> None:
    """Parts get whole sections, so a key that arrives may still be without effect."""
    read = set()
    for file in SOURCE.rglob("*.py"):
        if file.parent.name != "recipe":
            read |= {
                node.attr
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Attribute)
            }
    names = {key.rpartition(".")[2] for key in leaves()}
    names = {BY_PROPERTY.get(name, name) for name in names}
    assert names - read == {"import", *LAYOUT} - read, (
        "reward.import is field `function`; a layout is made of its section"
    )
