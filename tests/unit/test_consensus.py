"""What fails on one rank is raised on all, as an error of its kind."""

from pathlib import Path

import pytest

import dovetail as dt
from dovetail.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    DataError,
    MachineError,
    OptionError,
    UserError,
)
from dovetail.parallel.consensus import agreed
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from tests.helpers.harness import run
from tests.helpers.program import make_model, write_recipe, write_rows


def test_a_mistake_of_one_rank_is_of_its_kind_on_all() -> None:
    run(2, fail_on_one_rank)


def fail_on_one_rank() -> None:
    mesh = Mesh.build(Layout(dp=2))
    kinds: list[tuple[UserError | MachineError | OSError, type[Exception]]] = [
        (DataError("here"), DataError),
        (ConfigError("here"), ConfigError),
        (OptionError("here"), OptionError),
        (DamagedError("here", Path("file")), CheckpointError),
        (FileNotFoundError("here"), CheckpointError),
        (MachineError("here"), MachineError),
    ]
    for error, expected in kinds:
        with pytest.raises(expected, match=r"^rank 1: here$") as caught:
            raise_on_rank_1(error, mesh)
        assert caught.type is expected


def raise_on_rank_1(error: Exception, mesh: Mesh) -> None:
    with agreed(mesh):
        if mesh["world"].rank == 1:
            raise error


def test_mistakes_in_rows_are_data_errors_from_python(tmp_path: Path) -> None:
    model = make_model(tmp_path / "M")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    recipe = write_recipe(tmp_path / "recipe.yaml", model, rows)
    run(1, train_on_wrong_rows, str(recipe))


def train_on_wrong_rows(recipe: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row lacks 'completion'"):
        dt.Trainer(recipe, device="cpu").train()
