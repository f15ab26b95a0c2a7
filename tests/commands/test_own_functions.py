"""Recipes with a loss and an advantage by import, as commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.program import here, make_model, on_ranks, write_recipe, write_rows
from tests.helpers.tolerances import MODEL_FP32, assert_sum_close

ROOT = Path(__file__).parents[2]
MINE = '''
import sys
import torch


def clipped(stats, batch, low=0.2, high=0.2):
    """As the built-in term."""
    ratio = (stats.logprob - batch.fields["old_logprob"]).exp()
    a = batch.fields["advantage"]
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high)), {"mine": ratio}


def others(rewards, groups, batch):
    """As RLOO's."""
    same = groups[:, None] == groups[None]
    total, count = (same * rewards).sum(1), same.sum(1)
    return rewards - (total - rewards) / (count - 1)


def late(stats, batch, ends=False):
    """Fails after its trial, whose advantages begin with -1."""
    if ends and batch.fields["advantage"][0] != -1:
        sys.exit("enough")
    elif batch.fields["advantage"][0] != -1:
        raise ValueError("too late")
    return -stats.logprob
'''
REWARD = """
def count(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 7)
"""  # its processes import no torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    make_model(folder / "model")
    (folder / "mine.py").write_text(MINE)
    (folder / "reward.py").write_text(REWARD)
    shutil.copy(ROOT / "examples" / "own_loss.py", folder / "own_loss.py")
    write_rows(
        folder / "rows.jsonl",
        [{"prompt": text, "answer": text} for text in ("ab", "xyz", "hello", "q")],
    )
    return folder


def recipe(folder: Path, run: str, /, **algorithm: Any) -> Path:
    keys = {"name": "rloo", "num_mini_batches": 2, "kl_coef": 0.1, **algorithm}
    sections: dict[str, Any] = {
        "reward": {"import": "reward:count", "workers": 1},
        "optim": {"lr": 1e-2},
    }
    path = write_recipe(
        folder / f"{run}.yaml", folder / "model", folder / "rows.jsonl", algorithm=keys, **sections
    )
    path.write_text(path.read_text().replace(str(folder / "run"), str(folder / f"run-{run}")))
    return path


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
    ]


def test_own_functions_train_as_the_built_in_ones(folder: Path) -> None:
    own = {
        "loss": {"import": "mine:clipped", "options": {"high": 0.2}},
        "advantage": {"import": "mine:others"},
    }
    for name, keys in {"built_in": {}, "own": own}.items():
        ended = here("train", recipe(folder, name, **keys), "--device", "cpu")
        assert ended.code == 0, ended.err
    for mine, theirs in zip(metrics(folder, "own"), metrics(folder, "built_in"), strict=True):
        loss, expected, *terms = map(
            torch.tensor, (mine["loss"], theirs["loss"], theirs["reward_std"], theirs["kl_mean"])
        )  # advantages are rewards less their mean
        assert_sum_close(loss, expected, terms, MODEL_FP32, "loss")
        for key in ("grad_norm", "reward_mean", "kl_mean", "entropy_mean"):
            assert mine[key] == pytest.approx(theirs[key], rel=MODEL_FP32), key
        assert mine["mine"] == pytest.approx(theirs["ratio_mean"], rel=MODEL_FP32)
        assert mine["grad_norm"] > 0


def test_the_example_runs_on_two_ranks(folder: Path) -> None:
    keys = {
        "name": "grpo",
        "loss": {"import": "own_loss:truncated", "options": {"cap": 1.5}},
        "advantage": {"import": "own_loss:best_of_group"},
    }
    ended = on_ranks(
        2, "train", recipe(folder, "example", **keys), "--device", "cpu", "--layout", "cp=2"
    )
    assert [each.code for each in ended] == [0, 0], ended[0].err
    rows = metrics(folder, "example")
    assert all(0 < row["sampler_weight"] <= 1.5 and row["grad_norm"] > 0 for row in rows)


def test_what_fails_in_a_step_names_the_function_and_its_line(folder: Path) -> None:
    file, lines = folder / "mine.py", MINE.splitlines()
    raises, ends = (
        lines.index(line) + 1
        for line in ('        raise ValueError("too late")', '        sys.exit("enough")')
    )
    said = {False: f"algorithm.loss mine:late: ValueError: too late (line {raises} of {file})",
            True: f"line {ends} of {file} ended the program by sys.exit('enough')"}  # fmt: skip
    for number, words in said.items():
        loss = {"import": "mine:late", "options": {"ends": number}}
        ended = here("train", recipe(folder, f"late-{number}", loss=loss), "--device", "cpu")
        assert (ended.code, ended.err.splitlines()[-1]) == (2, f"dovetail: {words}")


def test_a_function_that_is_not_there_is_refused_before_ranks_start(folder: Path) -> None:
    once = {
        "num_mini_batches": 1,
        "kl_coef": 0.0,
    }  # the policy before the update is that of the update: not scored
    for given, words in (
        (
            {"loss": {"import": "mine:clipped"}, **once},
            "no 'old_logprob'; the fields of this run are advantage, count, rollout",
        ),
        (
            {"loss": {"import": "mine:clip"}},
            f"{folder}/mine.py has no function 'clip'; it has clipped, others",
        ),
        ({"advantage": {"import": "nowhere:f"}}, "algorithm.advantage 'nowhere:f'"),
        (
            {"loss": {"import": "mine:clipped", "options": {"lo": 1}}},
            "options has lo, which clipped(stats, batch, low, high)",
        ),
    ):
        ended = here("train", recipe(folder, "refused", **given), "--device", "cpu")
        assert ended.code == 2 and words in ended.err, ended.err
        assert not (folder / "run-refused").exists() or not any((folder / "run-refused").iterdir())
