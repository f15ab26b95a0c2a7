"""Evaluations of a run with several sets on several layouts, when a run is resumed, and `dovetail eval`."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, mode
from typing import Any
from unittest import mock

import pytest

from dovetail.records.runs import sample_files
from dovetail.rl.tasks import RLTask
from tests.helpers.program import (
    here,
    on_ranks,
    program,
    read_rows,
    refusal,
    refused_on,
    write_recipe,
    write_rows,
)
from tests.helpers.tolerances import OP_FP32

MODULE = """
def score(completions, **columns):
    return [float(sum(text.encode()) % 2) for text in completions]

def longest(completions, **columns):
    return max(map(len, completions))

def breaks(completions, **columns):
    raise RuntimeError("on purpose")
"""
DRAWN = ("avg@4", "avg@2", "pass@1", "pass@3", "maj@4", "mine:longest", "mine:breaks")
SETS = (
    {"name": "greedy", "data": "rows.jsonl"},
    {
        "name": "drawn",
        "data": "rows.jsonl",
        "samples": 4,
        "temperature": 1.0,
        "metrics": list(DRAWN),
    },
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Prompts, a reward, metrics."""
    (tmp_path / "mine.py").write_text(MODULE)
    write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": text, "answer": "7", "id": text} for text in ("ab", "cde", "f")],
    )
    return tmp_path


def recipe_of(folder: Path, model: Path, **sections: Mapping[str, Any]) -> Path:
    rows = folder / "rows.jsonl"
    sections = {
        "algorithm": {"name": "grpo"},
        "reward": {"import": "mine:score", "workers": 1},
        "data": {"eval": str(rows)},
        "eval": {"sets": [{**each, "data": str(rows)} for each in SETS]},
        **sections,
    }
    return write_recipe(folder / "recipe.yaml", model, rows, **sections)


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of completions by their definitions."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["id"])]
    rewards = [[row["reward"] for row in group] for group in groups]
    votes = [
        mode(row["completion"].strip() for row in group) for group in groups
    ]  # of equally frequent ones the first
    firsts = [
        next(row for row in group if row["completion"].strip() == vote)
        for group, vote in zip(groups, votes, strict=True)
    ]
    return {
        "avg@4": fmean(map(fmean, rewards)),
        "avg@2": fmean(fmean(group[:2]) for group in rewards),
        "pass@1": fmean(map(fmean, rewards)),
        "pass@3": fmean(fmean(map(max, itertools.combinations(group, 3))) for group in rewards),
        "maj@4": fmean(row["reward"] for row in firsts),
        "longest": float(max(len(row["completion"]) for row in rows)),
    }


def numbers(row: Mapping[str, Any], ending: str = "") -> dict[str, float]:
    """Of an evaluation."""
    own = {name: value for name, value in row.items() if name.startswith("eval")}
    return {
        name.removesuffix(ending): v
        for name, v in own.items()
        if name.endswith("_before") == bool(ending)
    }


def tokens(run: Path) -> dict[str, list[Any]]:
    files = sorted((run / "eval").glob("**/*.jsonl"))
    return {
        str(path.relative_to(run)): [
            (r["id"], r["sample"], r["token_ids"]) for r in read_rows(path)
        ]
        for path in files
    }


@pytest.mark.parametrize(
    "layouts", [("dp=2",), pytest.param(("tp=2", "dp=2"), marks=pytest.mark.soak)], ids=len
)
def test_two_sets_give_the_same_numbers_on_every_layout(
    layouts: tuple[str, ...], model: Path, folder: Path
) -> None:
    recipe = recipe_of(folder, model)
    assert (alone := here("train", recipe, f"run_dir={folder}/one")).code == 0, alone
    first, last = read_rows(folder / "one/metrics.jsonl")
    names = ["eval_reward_mean", "eval_solved", "eval/greedy/avg@1", "eval/greedy/pass@1"]
    names += [f"eval/drawn/{metric.removeprefix('mine:')}" for metric in DRAWN]
    assert list(numbers(first, "_before")) == list(numbers(last)) == names
    for row, step in ((numbers(first, "_before"), 0), (numbers(last), 2)):
        expected = measured(read_rows(folder / f"one/eval/drawn/step_{step:06}.jsonl"))
        assert {name: row[f"eval/drawn/{name}"] for name in expected} == pytest.approx(
            expected, abs=OP_FP32
        )
        assert row["eval/drawn/breaks"] is None
        assert (
            row["eval/greedy/avg@1"] == row["eval_reward_mean"]
            and row["eval/greedy/pass@1"] == row["eval_solved"]
        )
    assert "the metric breaks failed, the run goes on: RuntimeError: on purpose" in alone.out
    assert "eval/drawn/avg@4 " in alone.out
    found = tokens(folder / "one")
    assert list(found) == [
        f"eval/{name}step_00000{n}.jsonl" for name in ("drawn/", "greedy/", "") for n in (0, 2)
    ]
    kinds = [
        (file.step, file.kind) for file in sample_files(folder / "one") if file.kind != "rollout"
    ]
    assert kinds == [
        (step, kind) for step in (0, 2) for kind in ("eval", "eval drawn", "eval greedy")
    ]
    assert found["eval/step_000000.jsonl"] == found["eval/greedy/step_000000.jsonl"]
    for layout in layouts:
        ended = on_ranks(2, "train", recipe, "--layout", layout, f"run_dir={folder}/{layout}")
        assert [each.code for each in ended] == [0, 0], ended
        ours = read_rows(folder / layout / "metrics.jsonl")
        assert tokens(folder / layout) == found
        assert numbers(ours[0], "_before") == numbers(first, "_before") and numbers(
            ours[1]
        ) == numbers(last)


def test_a_resumed_run_evaluates_nothing_twice(model: Path, folder: Path) -> None:
    recipe = recipe_of(folder, model, trainer={"save_every": 2, "eval_every": 1})
    metrics, greedy = folder / "run/metrics.jsonl", folder / "run/eval/greedy"
    with mock.patch.object(
        RLTask, "evaluate", autospec=True, side_effect=RLTask.evaluate
    ) as evaluated:
        assert here("train", recipe, "trainer.steps=4").code == 0
        assert [call.args[1] for call in evaluated.call_args_list] == [0, 1, 2, 3, 4]
        whole = [numbers(row) for row in read_rows(metrics)]
        assert here("train", recipe, "trainer.steps=4", "--resume", "step=2").code == 0
        assert [call.args[1] for call in evaluated.call_args_list[5:]] == [3, 4]
        assert [numbers(row) for row in read_rows(metrics)] == whole
        assert sorted(path.name for path in greedy.iterdir()) == [
            f"step_00000{n}.jsonl" for n in range(5)
        ]
        assert sorted(
            path.name for path in (folder / "run/superseded/001/eval/greedy").iterdir()
        ) == [
            "step_000003.jsonl",
            "step_000004.jsonl",
        ]
        # a stop between the last step and its evaluation
        rows = read_rows(metrics)
        write_rows(
            metrics, [*rows[:3], {k: v for k, v in rows[3].items() if not k.startswith("eval")}]
        )
        (folder / "run/hf").rename(folder / "hf")
        for more in (1, 0):
            done = evaluated.call_count
            assert here("train", recipe, "trainer.steps=4").code == 0
            assert evaluated.call_count == done + more
            assert [{**row, **numbers(row)} for row in read_rows(metrics)] == rows


def test_a_changed_set_is_a_change_that_a_run_may_have(model: Path, folder: Path) -> None:
    recipe = recipe_of(folder, model, trainer={"save_every": 1, "steps": 1})
    assert here("train", recipe).code == 0
    ended = here("train", recipe_of(folder, model, eval={}, trainer={"save_every": 1, "steps": 2}))
    assert ended.code == 0 and "changed since then: eval.sets: " in ended.out
    assert list(numbers(read_rows(folder / "run/metrics.jsonl")[1])) == [
        "eval_reward_mean",
        "eval_solved",
    ]


def test_the_best_checkpoint_is_the_best_of_the_first_set(model: Path, folder: Path) -> None:
    recipe = recipe_of(
        folder, model, data={}, trainer={"save_every": 1, "eval_every": 1, "keep_best": 1}
    )
    assert here("train", recipe).code == 0
    manifest = json.loads((folder / "run/checkpoints/step_000002/MANIFEST.json").read_text())
    last = read_rows(folder / "run/metrics.jsonl")[1]
    assert manifest["state"]["score"] == last["eval/greedy/avg@1"]


def test_supervised_runs_give_the_loss_of_every_set(model: Path, folder: Path) -> None:
    rows = write_rows(
        folder / "sft.jsonl",
        [{"prompt": "a", "completion": "bc"}, {"prompt": "d", "completion": "e"}],
    )
    sets = {"sets": [{"name": "same", "data": str(rows)}]}
    recipe = write_recipe(folder / "sft.yaml", model, rows, data={"eval": str(rows)}, eval=sets)
    assert here("train", recipe).code == 0
    first, last = read_rows(folder / "run/metrics.jsonl")
    assert (
        first["eval/same/loss_before"] == first["eval_loss_before"]
        and last["eval/same/loss"] == last["eval_loss"]
    )


def test_the_command_gives_the_numbers_of_a_run(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ran = here("train", recipe_of(folder, model), "trainer.steps=1")
    assert ran.code == 0 and "note: 3 of 3 rows of data.eval are rows of data.train" in ran.out
    row = read_rows(folder / "run/metrics.jsonl")[0]
    argv = [
        "eval",
        model,
        "--data",
        folder / "rows.jsonl",
        "--reward",
        "mine:score",
        "--max-new-tokens",
        4,
    ]
    ended = here(*argv)
    assert ended.code == 0 and ended.err == ""
    assert json.loads(ended.out) == {
        "prompts": 3,
        "samples": 1,
        "reward_errors": 0,
        **{name: row[f"eval/greedy/{name}_before"] for name in ("avg@1", "pass@1")},
    }
    assert "--reward 'mine.py:score'; expected module:function" in refusal(
        here(*argv, "--reward", "mine.py:score")
    )
    drawn = ["--samples", 4, "--temperature", 1, "--metrics", ",".join(DRAWN)]
    ended = here(*argv, *drawn, "--out", "out.jsonl")
    given = json.loads(ended.out)
    assert ended.err.startswith("dovetail: note: the metric breaks failed")
    rows = read_rows(folder / "out.jsonl")
    assert len(rows) == 12 and given["breaks"] is None
    expected = measured(rows)
    assert {name: given[name] for name in expected} == pytest.approx(expected, abs=OP_FP32)
    cut = program(*argv, *drawn, "--out", "tp.jsonl", "--layout", "tp=2", cwd=folder)
    assert cut.code == 0 and json.loads(cut.out) == given
    assert [row["token_ids"] for row in read_rows(folder / "tp.jsonl")] == [
        row["token_ids"] for row in rows
    ]


def test_rewards_of_the_command_are_added(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ended = here(
        "eval",
        model,
        "--data",
        "rows.jsonl",
        "--reward",
        "mine:score",
        "--reward",
        "exact_match",
        "--out",
        "o.jsonl",
    )
    rows = read_rows(folder / "o.jsonl")
    assert all(row["reward"] == sum(row["rewards"].values()) for row in rows)
    assert json.loads(ended.out)["avg@1"] == pytest.approx(
        fmean(row["reward"] for row in rows), abs=OP_FP32
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "missing.jsonl"], "missing.jsonl: no such data file"),
        (["--reward", "mine:missing"], "reward 'mine:missing' (looked up from "),
        (
            ["--metrics", "mine:missing"],
            "metric mine:missing, which is loaded as a reward: reward 'mine:missing'",
        ),
        (["--out", "rows.jsonl"], "--out rows.jsonl is the file that --data names"),
    ],
)
def test_mistakes_are_told_once(
    flags: list[str], words: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert words in refused_on(1, "eval", model, "--data", "rows.jsonl", *flags)


def test_rows_without_an_answer_are_refused_where_a_reward_reads_it(
    model: Path, folder: Path
) -> None:
    data = write_rows(folder / "bare.jsonl", [{"prompt": "a"}])
    assert "the row lacks 'answer'" in refusal(here("eval", model, "--data", data))
