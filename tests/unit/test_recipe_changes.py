"""Which changes of a recipe a run survives, which it refuses, and that no part of its state may be missing."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dovetail.checkpoint.manifest import TRAINING
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import saved_steps
from dovetail.errors import CheckpointError, ConfigError
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import load_recipe, make_recipe
from dovetail.rl.collect import step_rows
from dovetail.run.changes import refuse
from dovetail.run.directory import RunDirectory
from dovetail.run.paths import changed
from dovetail.run.resume import Resumed, find
from dovetail.run.state import RunState, random_state
from dovetail.weights.safe_paths import MANIFEST
from tests.golden.job import _merged as merged
from tests.helpers.forged import forge
from tests.helpers.program import (
    here,
    make_model,
    on_ranks,
    read_rows,
    refusal,
    write_recipe,
    write_rows,
)
from tests.helpers.training_checkpoint import state_of

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "algorithm": {"name": "ppo"},
    "data": {"train": "d.jsonl"},
    "optim": {"schedule": "cosine", "warmup_steps": 2},
    "trainer": {"steps": 10},
    "run_dir": "run",
}
ALLOWED: list[dict[str, Any]] = [
    {"optim": {"lr": 1e-3}},
    {"optim": {"weight_decay": 0.1}},
    {"optim": {"clip_norm": None}},
    {"optim": {"betas": [0.9, 0.95]}},
    {"optim": {"schedule": "linear"}},
    {"optim": {"warmup_steps": 5}},
    {"critic": {"lr": 1e-4}},
    {"algorithm": {"clip_high": 0.3}},
    {"algorithm": {"kl_coef": 0.1}},
    {"algorithm": {"critic_warmup": 3}},
    {"rollout": {"temperature": 0.7}},
    {"rollout": {"samples_per_prompt": 4}},
    {"rollout": {"max_new_tokens": 8}},
    {"reward": {"name": "format", "options": {"pattern": "x"}}},
    {"trainer": {"steps": 20}},
    {"trainer": {"steps": 5}},
    {"trainer": {"prompts_per_step": 3}},
    {"trainer": {"save_every": 1}},
    {"trainer": {"keep_last": 7}},
    {"trainer": {"eval_every": 2}},
    {"trainer": {"stop_at_reward": 0.5}},
    {"trainer": {"tokens_per_batch": 99}},
    {"trainer": {"activation_checkpointing": "full"}},
    {"layout": {"tp": 2}},
    {"layout": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}},
    {"rollout": {"layout": {"tp": 2}}},
    {"model": {"dtype": "bfloat16"}},
    {"model": {"save_dtype": "bfloat16"}},
    {"model": {"path": "moved"}},
    {"data": {"train": "moved.jsonl"}},
    {"data": {"eval": "e.jsonl"}},
    {"reference": {"path": "other"}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"name": "grpo"}}, "algorithm.name was 'ppo', is 'grpo'"),
    ({"algorithm": {"name": "sft"}}, "the algorithms keep different state"),
    ({"trainer": {"seed": 1}}, "trainer.seed was 0, is 1: data order"),
    ({"data": {"shuffle": False}}, "rows would be taken twice, or not at all"),
    ({"trainer": {"steps": 4}}, "trainer.steps is 4, but the run has done 5 steps already"),
    ({"critic": {"path": "other"}}, "the critic goes on from the weights that it has learned"),
    (
        {"algorithm": {"num_mini_batches": 2}},
        "the learning rate's schedule counts optimizer steps, and would jump",
    ),
    ({"algorithm": {"epochs": 3}}, "algorithm.epochs was 1, is 3"),
]


def full(**sections: Any) -> dict[str, Any]:
    return make_recipe(merged(BASE, sections)).model_dump(mode="json", by_alias=True)


@pytest.mark.parametrize("change", ALLOWED, ids=json.dumps)
def test_changes_that_a_run_survives_are_told(change: dict[str, Any]) -> None:
    now = full(**change)
    found = changed(full(), now)
    refuse(found, now, step=5)
    for section, keys in change.items():
        for key, value in keys.items():
            told = {
                name: pair for name, pair in found.items() if name.startswith(f"{section}.{key}")
            }
            assert told, f"{section}.{key} changed unseen"
            assert all(before != after for before, after in told.values())
            assert isinstance(value, dict) or any(after == value for _, after in told.values())


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_changes_that_cannot_be_right_are_refused(change: dict[str, Any], words: str) -> None:
    now = full(**change)
    with pytest.raises(ConfigError) as caught:
        refuse(changed(full(), now), now, step=5)
    assert words in str(caught.value)
    assert "take them back, or start a new run (another run_dir) with model.path=" in str(
        caught.value
    )


def test_under_a_constant_rate_the_updates_of_a_step_are_free() -> None:
    constant = {"optim": {"schedule": "constant", "warmup_steps": 0}}
    now = full(**constant, algorithm={"num_mini_batches": 2, "epochs": 2})
    refuse(changed(full(**constant), now), now, step=5)


def test_where_a_run_writes_is_no_change() -> None:
    assert not changed(full(), full(run_dir="elsewhere"))


def test_a_resumed_run_continues_at_its_cursor(tmp_path: Path) -> None:
    """Rows are taken once, whatever trainer.prompts_per_step was in the steps before."""
    recipe = make_recipe(
        merged(BASE, {"run_dir": str(tmp_path), "trainer": {"prompts_per_step": 3}})
    )
    run = RunDirectory(recipe, Mesh.solo())
    assert step_rows(recipe, 100, 0, run.first_row) == step_rows(recipe, 100, 0)
    state: Any = SimpleNamespace(step=5, cursor=20)  # of steps of 4 rows
    run.resumed = Resumed(reader=mock.Mock(), state=state, changes=(), passed_over=(), repeats=True)
    assert run.first_row + 5 * 3 == 20


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of ppo and its run after two steps; tests copy it, since recipes name it by ."""
    folder = tmp_path_factory.mktemp("begun")
    make_model(folder / "model", dtype=torch.bfloat16)
    rows = write_rows(
        folder / "rows.jsonl", [{"prompt": text, "answer": "c"} for text in ("ab", "cd", "ef")]
    )
    trainer = {"steps": 2, "save_every": 1}
    recipe = write_recipe(
        folder / "r.yaml", folder / "model", rows, algorithm={"name": "ppo"}, trainer=trainer
    )
    assert here("train", recipe).code == 0
    shutil.rmtree(folder / "run/hf")
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(begun, tmp_path / "job", symlinks=True))
    (copy / "r.yaml").write_text((begun / "r.yaml").read_text().replace(str(begun), str(copy)))
    return copy


@pytest.mark.parametrize(
    ("override", "repeats"),
    [("trainer.save_every=1", True), ("trainer.save_every=2", True), ("optim.lr=0.5", False)],
)
def test_policies_are_made_again_where_no_change_moves_them(
    override: str, repeats: bool, begun: Path
) -> None:
    """Groups that later policies have sampled are of use only to them: docs/async.md."""
    recipe = load_recipe(str(begun / "r.yaml"), [override])
    keys = recipe.model_dump(mode="json", by_alias=True)
    found = find(begun / "run", Mesh.solo(), "auto", keys)
    assert found is not None and found.repeats == repeats


def test_allowed_changes_by_command(folder: Path) -> None:
    ended = on_ranks(
        2, "train", folder / "r.yaml", "optim.lr=0.5", "trainer.steps=3", "--layout", "tp=2"
    )
    assert [each.code for each in ended] == [0, 0], ended
    assert "changed since then: optim.lr: 0.001 -> 0.5" in ended[0].out
    assert "changed since then: ranks: 'one' -> 'tp=2'" in ended[0].out
    (event,) = (row for row in read_rows(folder / "run/events.jsonl") if row["kind"] == "resumed")
    assert event["step"] == 2 and "trainer.steps: 2 -> 3" in event["changes"]
    assert re.fullmatch(r"[0-9T:-]{19}\.[0-9]{3}\+00:00", event["time"]), (
        "as the incidents of a death or a hang are dated"
    )
    assert [row["lr"] for row in read_rows(folder / "run/metrics.jsonl")] == [1e-3, 1e-3, 0.5]


def test_a_run_that_saved_nothing_begins_anew_with_the_changes_that_one_survives(
    folder: Path, begun: Path
) -> None:
    """What it had written is kept aside."""
    shutil.rmtree(folder / "run/checkpoints")
    config = folder / "run/config.yaml"
    config.write_text(config.read_text().replace(str(begun), str(folder)))
    shutil.copy(folder / "rows.jsonl", folder / "others.jsonl")
    for given, words in (
        (
            f"data.train={folder}/others.jsonl",
            "it holds a run of another recipe that saved no checkpoint",
        ),
        ("algorithm.name=grpo", "the run cannot go on with these changes"),
    ):
        assert words in refusal(here("train", folder / "r.yaml", given))
    ended = here("train", folder / "r.yaml", "trainer.save_every=2", "layout.dp=1")
    assert ended.code == 0, ended.err
    assert [row["step"] for row in read_rows(folder / "run/metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in read_rows(folder / "run/superseded/001/metrics.jsonl")] == [1, 2]


def other_rows(folder: Path) -> None:
    write_rows(
        folder / "rows.jsonl",
        [{"prompt": text, "answer": "c"} for text in ("ab", "cd", "ef", "gh")],
    )


def other_order(folder: Path) -> None:
    write_rows(
        folder / "rows.jsonl", [{"prompt": text, "answer": "c"} for text in ("cd", "ab", "ef")]
    )


def other_config(folder: Path) -> None:
    path = folder / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-2}))


def other_template(folder: Path) -> None:
    (folder / "model/chat_template.jinja").write_text("{{ messages }}")


def other_weights(folder: Path) -> None:
    """One bit of one value of the last tensor; sizes, names and dtypes stay."""
    flip(folder / "model/model.safetensors", -3)


def flip(file: Path, where: int) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            other_rows,
            "the rows of data.train changed since it was saved; restore what data.train named then",
        ),
        (other_order, "the rows of data.train changed since it was saved"),
        (
            other_config,
            "the model's config, tokenizer or weights changed since it was saved; restore what model.path",
        ),
        (other_template, "the model's config, tokenizer or weights changed"),
        (other_weights, "the model's config, tokenizer or weights changed"),
    ],
)
def test_other_contents_under_the_same_names_are_refused(
    change: Callable[[Path], None], words: str, folder: Path
) -> None:
    change(folder)
    before = sorted((folder / "run").rglob("*"))
    assert words in refusal(here("train", folder / "r.yaml"))
    assert sorted((folder / "run").rglob("*")) == before


def test_rows_that_were_dropped_follow_more_than_their_file(folder: Path) -> None:
    """Who lowers trainer.tokens_per_batch has other rows, and is told which keys to look at."""
    other_rows(folder)
    told = refusal(here("train", folder / "r.yaml", "data.overlong_rows=drop"))
    assert (
        "restore what data.train, trainer.tokens_per_batch, rollout.max_new_tokens and layouts, by which"
        in told
    )


def test_a_finished_run_is_not_begun_again(folder: Path) -> None:
    assert here("train", folder / "r.yaml").code == 0, "killed before its final model was written"
    ended = here("train", folder / "r.yaml")
    assert (ended.code, ended.err.count("\n")) == (
        0,
        1,
    ) and "holds this run, which is finished" in ended.err, ended
    ended = here("train", folder / "r.yaml", "trainer.keep_last=5", "trainer.loggers=[tensorboard]")
    assert ended.code == 0 and "holds this run, which is finished" in ended.err, (
        "no number of it would be another"
    )
    told = refusal(here("train", folder / "r.yaml", "optim.lr=0.5"))
    assert (
        "a finished run of another recipe (optim.lr was 0.001, is 0.5); all 2 steps of it are done"
        in told
    ), told
    assert "or raise trainer.steps to train on" in told, told
    assert here("train", folder / "r.yaml", "trainer.steps=3").code == 0
    assert [row["step"] for row in read_rows(folder / "run/metrics.jsonl")] == [1, 2, 3]
    shutil.rmtree(newest(folder))  # as of a run that was stopped once and has trainer.save_every=0
    told = refusal(here("train", folder / "r.yaml", "trainer.steps=4"))
    words = "whose newest checkpoint is of step 2 of 3: go back to step 2 by --resume step=2, or choose another run_dir"
    assert words in told, told
    assert (folder / "run/hf").exists()


def test_a_damaged_piece_of_a_finished_run_that_is_to_go_on_is_named(folder: Path) -> None:
    (folder / "run/hf").mkdir()
    piece = next(newest(folder).glob("pieces-*"))
    flip(piece, -1)
    told = refusal(here("train", folder / "r.yaml", "trainer.steps=3"))
    assert "the finished run in run_dir" in told, told
    assert "go back to step 1 by --resume step=1, or choose another run_dir" in told, told
    assert f"{piece.name}: " in told and "does not match its checksum" in told, told
    assert "another recipe" not in told, told
    assert (folder / "run/hf").exists()


def test_a_finished_run_without_checkpoints_is_not_said_to_go_on(folder: Path) -> None:
    assert (
        here(
            "train", folder / "r.yaml", "trainer.save_every=0", "run_dir=" + str(folder / "b")
        ).code
        == 0
    )
    again = ["train", folder / "r.yaml", "trainer.save_every=0", "run_dir=" + str(folder / "b")]
    ended = here(*again)
    assert ended.code == 0 and ended.err.endswith("choose another run_dir to train again\n"), ended
    told = refusal(here(*again, "trainer.steps=3"))
    words = "it holds a run of another recipe that saved no checkpoint (trainer.steps was 2, is 3)"
    assert f"move that one away: {words}" in told, told


def test_a_run_whose_metrics_are_damaged_goes_on_and_says_which_rows_are_kept(folder: Path) -> None:
    metrics = folder / "run/metrics.jsonl"
    _, second = metrics.read_text().splitlines()
    metrics.write_text(f"garbage\n{second}\n")
    ended = here("train", folder / "r.yaml", "trainer.steps=3")
    assert ended.code == 0, ended
    lost = "was lost or damaged: it has no row of step 1; the rows of step 2 are kept"
    assert f"{metrics} {lost}; the run goes on\n" in ended.out, ended.out
    assert [row["step"] for row in read_rows(metrics)] == [2, 3]
    assert (folder / "run/superseded/001/metrics.jsonl").read_text() == "garbage\n"


def newest(folder: Path) -> Path:
    return saved_steps(folder / "run/checkpoints")[0][0].path


def only_newest(folder: Path) -> Path:
    for saved in saved_steps(folder / "run/checkpoints")[0][1:]:
        shutil.rmtree(saved.path)
    return newest(folder)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_field_of_the_state_is_missed_by_name(stride: int, folder: Path) -> None:
    """Its checksum is made right again, so that nothing but the field is wrong."""
    step = only_newest(folder)
    whole = (step / MANIFEST).read_bytes()
    state = ShardedReader(step).manifest.state
    assert state is not None and set(state) == set(RunState.model_fields)
    paths: list[tuple[Any, ...]] = [(name,) for name in state] + [
        ("updates", role) for role in state["updates"]
    ]
    paths += [("rng", 0, kind) for kind in state["rng"][0]] + [("rng", 0)]
    for path in paths[::stride]:

        def drop(body: dict[str, Any], path: tuple[Any, ...] = path) -> None:
            inner = body["state"]
            for key in path[:-1]:
                inner = inner[key]
            del inner[path[-1]]

        forge(step, drop)
        told = refusal(here("train", folder / "r.yaml"))
        assert str(path[-1] or path[0]) in told, (path, told)
        (step / MANIFEST).write_bytes(whole)


ODD: list[tuple[tuple[Any, ...], Any, str]] = [
    (("step",), -1, "step is -1: Input should be greater than or equal to 0"),
    (("updates", "policy"), [1], "updates.policy is [1]: Input should be a valid integer"),
    (("updates", "critic"), True, "updates.critic is True: Input should be a valid integer"),
    (
        ("updates", "critic"),
        1 << 64,
        "updates.critic is 18446744073709551616: Input should be less than 281474976710656",
    ),
    (("before",), {"eval_loss": "x"}, "before.eval_loss is 'x': Input should be a valid number"),
    (("rng", 0, "python"), 7, "rng.0.python is 7: Input should be a valid string"),
]


@pytest.mark.parametrize(("path", "value", "words"), ODD, ids=lambda value: str(value)[:40])
def test_odd_values_of_the_state_are_told_by_name(
    path: tuple[Any, ...], value: Any, words: str
) -> None:
    state = json.loads(json.dumps(state_of(1, 1, updates={"policy": 1, "critic": 1})))
    drawn = random_state(torch.device("cpu"))
    assert RunState.parse(state, Path("it")).step == 1
    inner: Any = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointError, match=re.escape(words)):
        RunState.parse(state, Path("it"))
    assert random_state(torch.device("cpu")) == drawn, "nothing goes on from it"


def test_every_kind_of_training_tensor_is_missed_by_name(folder: Path) -> None:
    """A weight as it is trained, each moment, of both roles; and the model's own: a tensor in one layer, and a norm."""
    step = only_newest(folder)
    whole = (step / MANIFEST).read_bytes()
    tensors = ShardedReader(step).manifest.tensors
    kinds = {name.split("/")[1:3].__str__() for name in tensors if name.startswith(TRAINING)}
    assert len(kinds) == 6, "param, exp_avg and exp_avg_sq of policy and critic"
    chosen = [
        name
        for name in tensors
        if name.startswith(TRAINING)
        and name.endswith(("/model.norm.weight", "layers.1.mlp.up_proj.weight", "score.bias"))
    ]
    assert len(chosen) == 15
    some = chosen[::2]  # every kind, and each of the three
    assert {"/".join(name.split("/")[1:3]) for name in some} == {
        "/".join(name.split("/")[1:3]) for name in chosen
    }
    assert {name.rpartition("/")[2] for name in some} == {
        name.rpartition("/")[2] for name in chosen
    }
    for name in some:
        forge(step, lambda body, name=name: body["tensors"].pop(name))  # type: ignore[misc]
        told = refusal(here("train", folder / "r.yaml"))
        start, _, rest = name.removeprefix(TRAINING).split("/", 2)[0], None, name.split("/", 3)[3]
        assert f"missing: {rest}" in told and f"/{start}/" in told, (name, told)
        (step / MANIFEST).write_bytes(whole)
    assert here("train", folder / "r.yaml").code == 0
