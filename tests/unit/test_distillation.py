"""Whole runs of distillation from a recipe, examples/distillation.py, and what recipes are refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dovetail as dt
from bench.models import one_rank
from dovetail.batch.loss import TokenStats
from dovetail.engine.teacher import Teacher, evaluate
from dovetail.errors import ConfigError, ModelError
from dovetail.recipe.schema import make_recipe
from dovetail.rl.algorithms.distillation import DistillationLoss
from dovetail.rl.algorithms.table import make_algorithm
from dovetail.rl.custom import Custom
from dovetail.rl.distillation_task import DistillationTask, prompt_of
from examples import distillation
from tests.golden.job import MODEL, RL_ROWS, SFT_ROWS, play, sft, write_inputs
from tests.helpers.tolerances import SUM_ORDER

ROOT = Path(__file__).parents[2]
TEACHER = "teacher"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a teacher that another run has taught the sums, of another width than the student."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    with one_rank():
        play(sft(folder, folder / "taught", trainer={"steps": 24}))
        yield folder


def recipe_of(
    inputs: Path, run_dir: Path, rows: str = SFT_ROWS, **algorithm: Any
) -> dict[str, Any]:
    return sft(
        inputs, run_dir,
        algorithm={"name": "distillation", **algorithm},
        teacher={"path": str(inputs / "taught/hf")},
        data={"train": str(inputs / rows), "eval": str(inputs / rows)},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 3},
        trainer={"steps": 12},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "algorithm"),
    [
        (SFT_ROWS, {"divergence": "forward_kl", "lmbda": 0.0}),
        (
            SFT_ROWS,
            {"lmbda": 0.5, "beta": 0.3, "loss_top_k": 4, "temperature": 1.5, "num_mini_batches": 2},
        ),
        (RL_ROWS, {"divergence": "reverse_kl", "lmbda": 1.0}),
        (RL_ROWS, {"divergence": "sampled_reverse_kl"}),
    ],
    ids=["forward", "gkd", "reverse", "sampled"],
)
def test_a_student_nears_its_teacher(
    inputs: Path, tmp_path: Path, rows: str, algorithm: dict[str, Any]
) -> None:
    done = play(recipe_of(inputs, tmp_path, rows, **algorithm))
    name = "eval_sampled_reverse_kl" if "sampled" in str(algorithm) else "eval_divergence"
    assert 0 < done.after[name] < 0.7 * done.before[name]
    shares = {row["on_policy"] for row in done.rows}
    assert shares == ({0.0, 1.0} if algorithm.get("lmbda") == 0.5 else {float(rows == RL_ROWS)})
    names = {"sampled_reverse_kl", "entropy_mean", "response_length_mean"}
    names |= (
        {"divergence", "teacher_entropy_mean"}
        if "sampled" not in str(algorithm)
        else {"ratio_mean"}
    )
    assert all(names <= row.keys() for row in done.rows)
    assert sum(bool(ids) for ids in done.ids) == sum(row["on_policy"] for row in done.rows)


def test_the_example(inputs: Path, tmp_path: Path) -> None:
    reports = distillation.main(
        str(inputs / MODEL), str(inputs / "taught/hf"), str(tmp_path / "out"), dt.Layout()
    )
    assert reports[-1].metrics["divergence"] < reports[0].metrics["divergence"]
    assert len((ROOT / "examples/distillation.py").read_text().splitlines()) < 60


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(inputs: Path) -> None:
    """Where the teacher's states were of other tokens, their distributions would differ."""
    engine = dt.from_pretrained(inputs / MODEL, device="cpu", dtype=torch.float64)
    rows = [
        dt.Sequence([3, 5, 7, 4, 6], [False, False, True, True, True]),
        dt.Sequence([4, 8, 3], [False, True, True]),
    ]
    batch, states = Teacher.of(engine, engine).read(dt.PackedBatch.pack(rows))
    report = evaluate(engine, batch, DistillationLoss(teacher=states))
    assert abs(report.loss) < SUM_ORDER and abs(report.metrics["sampled_reverse_kl"]) < SUM_ORDER


@pytest.mark.parametrize(
    ("epochs", "mini_batches", "scored"), [(1, 1, 0), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
)
def test_samples_are_scored_before_several_updates(
    epochs: int, mini_batches: int, scored: int, tmp_path: Path
) -> None:
    """From the second update on the policy is another one than the samples were scored with."""
    algorithm = {
        "name": "distillation",
        "divergence": "sampled_reverse_kl",
        "lmbda": 1.0,
        "epochs": epochs,
        "num_mini_batches": mini_batches,
    }
    given = {"data": {"train": "rows"}, "teacher": {"path": "t"}, "algorithm": algorithm}
    recipe = make_recipe({"model": {"path": "m"}, "run_dir": str(tmp_path), **given})
    engines = [mock.Mock(), mock.Mock()]
    for engine in engines:
        engine.score = mock.Mock(side_effect=lambda batch: TokenStats(*torch.ones(2, len(batch))))
    policy, teacher = engines
    made: Any = make_algorithm(recipe, Custom())
    fields: Any = {"recipe": recipe, "policy": policy, "teacher": teacher, "algorithm": made}
    task = DistillationTask(**fields, rows=[], held_out=[])
    batch, _ = task.taught(dt.PackedBatch.pack([[3, 4, 5]]))
    assert ("old_logprob" in batch.fields, policy.score.call_count) == (bool(scored), scored)
    assert "teacher_logprob" in batch.fields and teacher.score.call_count == 1


def test_prompts_of_rows() -> None:
    assert prompt_of(3, dt.Sequence([5, 6, 7, 8], [False, False, True, True])).ids == (5, 6)
    assert prompt_of(3, dt.Sequence([5, 6])).ids == (5,)


def test_a_teacher_with_fewer_tokens_is_refused(inputs: Path) -> None:
    small = dt.from_pretrained(inputs / MODEL, device="cpu", dtype=torch.float64)
    large = dt.from_pretrained(inputs / MODEL, device="cpu", dtype=torch.float64)
    large.model.spec = replace(large.model.spec, vocab_size=1 << 20)
    with pytest.raises(
        ModelError, match=r"the teacher has a vocabulary of .*, the student one of 1048576"
    ):
        Teacher.of(small, large)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            {"divergence": "forward_kl", "beta": 0.1},
            "beta has no meaning for the divergence forward_kl",
        ),
        (
            {"divergence": "sampled_reverse_kl", "lmbda": 0.5},
            "learns from the student's own samples",
        ),
        (
            {"divergence": "sampled_reverse_kl", "loss_top_k": 5},
            "loss_top_k and temperature have no meaning",
        ),
        ({"lmbda": 1.5}, "lmbda"),
    ],
)
def test_mistakes_in_a_recipe(
    inputs: Path, tmp_path: Path, algorithm: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_recipe(recipe_of(inputs, tmp_path, **algorithm))
    with pytest.raises(ConfigError, match=r"teacher\.path is missing"):
        make_recipe({**recipe_of(inputs, tmp_path), "teacher": {}})
