"""Steps and evaluation of every divergence: on each layout, with a teacher in a layout of its own, as on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

import dovetail as dt
from dovetail.engine.teacher import Teacher, evaluate, hidden_states
from dovetail.rl.algorithms.distillation import DistillationLoss
from dovetail.rl.losses import weight_fields
from tests.helpers.harness import run
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny, tiny_configs
from tests.helpers.tolerances import SUM_ORDER, assert_close

LENGTHS = (9, 4, 13, 7, 2, 11)
CASES: dict[str, dict[str, Any]] = {
    "forward": {"divergence": "forward_kl"},
    "reverse": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd", "beta": 0.2},
    "tail": {"divergence": "jsd", "beta": 0.6, "top_k": 5},
    "renormalized": {
        "divergence": "reverse_kl",
        "top_k": 90,
        "tail": False,
    },  # more than a rank's columns
}
FAMILIES = {"dense": "llama_tied", "experts": "qwen3_moe"}


def batch_of() -> dt.PackedBatch:
    draw, rows = torch.Generator().manual_seed(3), []
    for n in LENGTHS:
        ids = torch.randint(1, VOCAB, (n,), generator=draw).tolist()
        rows.append(dt.Sequence(ids, [False] * (n // 3) + [True] * (n - n // 3)))
    batch = dt.PackedBatch.pack(rows, dtype=torch.float64)
    batch = batch.with_fields(temperature=torch.full((len(batch),), 1.3, dtype=torch.float64))
    return batch.with_fields(**weight_fields(batch, "sequence"))


def train(folder: Path, family: str, layout: dt.Layout, teachers: dt.Layout) -> dict[str, Any]:
    """Metrics and the weights after a step of each divergence in turn."""
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=1e-3), tokens_per_batch=24)
    keys: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "options": options}
    student = dt.from_pretrained(folder / family, layout=layout, **keys)
    teacher = Teacher.of(dt.from_pretrained(folder / "teacher", layout=teachers, **keys), student)
    found: dict[str, Any] = {"hidden": hidden_states(teacher.engine, batch_of())}
    batch, states = teacher.read(batch_of())
    for name, case in CASES.items():
        loss = DistillationLoss(teacher=states, **case)
        before = evaluate(student, batch, loss)
        report = student.train_step(batch.select([5, 2, 0, 1]), loss)
        assert not report.skipped
        found |= {
            f"{name} before {key}": x for key, x in {"loss": before.loss, **before.metrics}.items()
        }
        numbers = {"loss": report.loss, "norm": report.grad_norm, **report.metrics}
        found |= {f"{name} {key}": x for key, x in numbers.items() if not key.startswith("moe")}
        found |= {f"{name} {key}": x.clone() for key, x in student.weights(torch.float64)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher has another family, width and depth, and more ids."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in {**tiny_configs(), **moe_configs()}.items():
        if name in FAMILIES.values():
            save_tiny(config, folder / name)
    save_tiny(
        tiny(Qwen3Config, head_dim=16, vocab_size=VOCAB + 7, hidden_size=80, num_hidden_layers=3),
        folder / "teacher",
    )
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        kind: run(1, train, folder, name, dt.Layout(), dt.Layout())[0]
        for kind, name in FAMILIES.items()
    }


@pytest.mark.parametrize(
    ("kind", "layout", "teachers"),
    [
        ("dense", "tp=2", "dp=2"),
        ("dense", "cp=2", "pp=2"),
        ("experts", "dp=2,ep=2", "tp=2"),
        pytest.param("dense", "dp=2", "tp=2", marks=pytest.mark.soak),
        pytest.param("dense", "pp=2", "cp=2", marks=pytest.mark.soak),
        pytest.param("dense", "tp=2,pp=2", "dp=2,cp=2", marks=pytest.mark.soak),
        pytest.param("dense", "dp=2,tp=2", "pp=2,tp=2", marks=pytest.mark.soak),
        pytest.param("experts", "tp=2,cp=2,ep=2", "dp=4", marks=pytest.mark.soak),
    ],
)
def test_every_layout_is_one_rank(
    kind: str, layout: str, teachers: str, folder: Path, alone: dict[str, dict[str, Any]]
) -> None:
    own = dt.Layout.parse(layout)
    for found in run(own.num_ranks, train, folder, FAMILIES[kind], own, dt.Layout.parse(teachers)):
        assert found.keys() == alone[kind].keys()
        for name, value in found.items():
            a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (value, alone[kind][name]))
            assert_close(a, b, SUM_ORDER, f"{layout}: {name}")


def test_both_distributions_are_over_the_ids_of_the_student(
    alone: dict[str, dict[str, Any]],
) -> None:
    """Else ids beyond would take a share of the teacher's mass: its entropy is at most that of the student's vocabulary."""
    row = alone["dense"]
    assert 0 < row["forward before teacher_entropy_mean"] < torch.tensor(float(VOCAB)).log()
    assert row["forward before divergence"] > 0 and row["tail before divergence"] > 0
