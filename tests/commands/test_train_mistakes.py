"""Mistakes of a recipe, its rows and its model end `dovetail train` before any step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.program import (
    here,
    make_model,
    on_ranks,
    refusal,
    write_recipe,
    write_rows,
)

SFT_ROWS = [{"prompt": a, "completion": b} for a, b in (("ab", "cd"), ("x", ""), ("hi", "ho"))]
RL_ROWS = [{"prompt": "ab", "answer": "c"}, {"prompt": "hi", "answer": "h", "id": "hi"}]


@pytest.fixture
def sft_rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sft.jsonl", SFT_ROWS)


@pytest.fixture
def rl_rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rl.jsonl", RL_ROWS)


def _occupied(folder: Path) -> list[str]:
    (folder / "run").mkdir()
    (folder / "run" / "old").write_text("x")
    return []


def _absent_rows(folder: Path) -> list[str]:
    return [f"data.train={folder}/absent.jsonl"]


def _bad_rows(folder: Path) -> list[str]:
    return [f"data.eval={write_rows(folder / 'bad.jsonl', ['{'])}"]


def _small_vocabulary(folder: Path) -> list[str]:
    return [f"reference.path={make_model(folder / 'small', vocab_size=100)}"]


def _small_critic(folder: Path) -> list[str]:
    return [f"critic.path={make_model(folder / 'small', vocab_size=100)}", "algorithm.name=ppo"]


def _bad_weights(folder: Path) -> list[str]:
    source = make_model(folder / "damaged")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-1])
    return [f"model.path={source}"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_occupied, "is not empty; choose another run_dir, or move that one away"),
        (_absent_rows, "absent.jsonl: no such data file"),
        (_bad_rows, "bad.jsonl:1: not JSON"),
        (_bad_weights, "is cut, corrupt or no safetensors file"),
        (
            _small_vocabulary,
            "small has a vocabulary of 100, but the policy's ids go up to 259; give a model with",
        ),
        (
            _small_critic,
            "small has a vocabulary of 100, but the policy's ids go up to 259; give a model with",
        ),
        (
            ["reward.options.tolerance=2"],
            "reward.options has tolerance, which it does not take (it takes: none)",
        ),
        (
            ["reward.name=format", "reward.options.p=x"],
            "reward.options has p, which it does not take (it takes: pattern)",
        ),
        (["reward.name=exactmatch"], "reward.name='exactmatch' is no built-in reward"),
        (
            ["reward.import=absent_module:f"],
            "cannot be loaded: ModuleNotFoundError: No module named 'absent_module'",
        ),
        (["critic.path=/nowhere", "algorithm.name=ppo"], "/nowhere is not a directory"),
        (["reference.path=/nowhere"], "/nowhere is not a directory"),
        (
            ["rollout.layout.tp=2"],
            "rollout.layout: layout tp=2,dp=auto needs a multiple of 2 ranks, but the job has 1",
        ),
        (
            ["critic.layout.tp=3", "algorithm.name=ppo"],
            "critic.layout: layout tp=3,dp=auto needs a multiple of 3 ranks, but the job has 1",
        ),
        (["layout.virtual_stages=2"], "leave them out at pp=1"),
        (["layout.schedule=interleaved"], "leave them out at pp=1"),
        (["layout.cp_mode=ulysses"], "cp_mode=ulysses says how to cut by cp; leave it out at cp=1"),
        (["optim.lrr=1"], "unknown key optim.lrr; did you mean optim.lr?"),
        (
            ["trainer.tokens_per_batchs=1"],
            "unknown key trainer.tokens_per_batchs; did you mean trainer.tokens_per_batch?",
        ),
        (
            ["rollout.samples_per_prompt=1"],
            "rollout.samples_per_prompt is 1; grpo compares a prompt's samples",
        ),
        (
            ["--resume", "step=3"],
            "--resume step=3: run_dir",
        ),
        (["steps"], "has no value; expected key.path=value"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_mistakes_are_found_before_any_step_and_by_a_dry_run_too(
    dry: bool, spoil: Any, words: str, model: Path, rl_rows: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", model, rl_rows, algorithm={"name": "grpo"})
    given = spoil if isinstance(spoil, list) else spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    told = refusal(here("train", recipe, *given, *(["--dry-run"] if dry else [])))
    assert words in told, told
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_family_that_nobody_knows_is_told_at_once_and_briefly(
    backend: str, rl_rows: Path, tmp_path: Path
) -> None:
    """Not that another backend might run it, nor all the types that transformers knows."""
    strange = make_model(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "strange"}))
    recipe = write_recipe(tmp_path / "r.yaml", strange, rl_rows, algorithm={"name": "grpo"})
    told = refusal(here("train", recipe, f"rollout.backend={backend}"))
    assert "Unrecognized model identifier: strange" in told
    assert "rollout.backend" not in told
    assert len(told) < 500


def test_mistakes_are_the_same_on_two_ranks(model: Path, rl_rows: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", model, rl_rows, algorithm={"name": "ppo"})
    for given, words in (
        (["reward.import=absent_module:f"], "No module named 'absent_module'"),
        (["critic.path=/nowhere"], "/nowhere is not a directory"),
        (
            ["critic.layout.pp=2", "critic.layout.virtual_stages=2"],
            "critic.layout: layout pp=2: pp=2 x virtual_stages=2 makes 4 stages",
        ),
        (
            ["rollout.layout.cp=4"],
            "rollout.layout: layout cp=4,dp=auto needs a multiple of 4 ranks, but the job has 2",
        ),
        (_occupied, "is not empty; choose another run_dir"),
    ):
        given = given if isinstance(given, list) else given(tmp_path)
        ended = on_ranks(2, "train", recipe, "--layout", "dp=2", *given)
        assert len({(each.code, each.err) for each in ended}) == 1, ended
        assert words in refusal(ended[0]), ended[0]
