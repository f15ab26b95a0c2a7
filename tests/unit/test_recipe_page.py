"""docs/recipe.md is what the schema says; the algorithms that it tells of are recipes; the commands and the README lead to it."""

from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.arguments import parse
from dovetail.recipe.algorithms import SFTSection
from dovetail.recipe.keys import VARIANTS
from dovetail.recipe.schema import make_recipe
from tools import names_page
from tools.recipe_page import TARGET, page

SMALLEST = {"model": {"path": "M"}, "data": {"train": "rows.jsonl"}, "run_dir": "runs/x"}


def test_the_page_is_what_the_code_says() -> None:
    assert page() == TARGET.read_text(), "write it again: python -m tools.recipe_page"


@pytest.mark.parametrize("project", names_page.PAGES)
def test_the_tables_of_names_are_what_the_code_says(project: str) -> None:
    target = names_page.DOCS / names_page.PAGES[project]
    assert names_page.page(project) == target.read_text(), (
        "write it again: python -m tools.names_page"
    )
    assert f"(docs/{target.name})" in Path("README.md").read_text()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_algorithm_is_a_recipe(variant: str) -> None:
    """Whose keys its algorithm takes."""
    keys: dict[str, Any] = dict(VARIANTS[variant])
    algorithm = make_recipe({**SMALLEST, "teacher": {"path": "T"}, "algorithm": keys}).algorithm
    written = algorithm.model_dump(mode="json", by_alias=True)
    assert {key: written[key]["name"] if key == "loss" else written[key] for key in keys} == keys
    assert isinstance(algorithm, SFTSection) == (variant == "sft")


def test_the_readme_and_the_help_lead_to_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(docs/recipe.md)" in Path("README.md").read_text()
    with pytest.raises(SystemExit):
        parse(["train", "--help"])
    assert "dovetail docs recipe" in capsys.readouterr().out
