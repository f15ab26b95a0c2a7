"""Vision-language models in the transformers engine equal plain transformers, image by image and gradient by gradient."""

from functools import partial
from pathlib import Path

import pytest

from dovetail.layout import Layout
from tests.harness import run
from tests.hf.families import VISION
from tests.hf.sights import sights, write_sights
from tests.hf.test_parity import check, figures

BUDGET = 80
LAYOUTS = ("dp=1", "dp=2", "cp=2", "cp=4", "cp=2,dp=2")


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family as a language model; one as a critic."""
    made = {name: write_sights(name, tmp_path_factory.mktemp(name)) for name in VISION}
    critic = tmp_path_factory.mktemp("critic")
    return {**made, "qwen3_vl-value": write_sights("qwen3_vl", critic, values=True)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_equals_transformers(seen: dict[str, Path], layout: str) -> None:
    parsed = Layout.parse(layout)
    for name, folder in seen.items():
        make = partial(sights, name.removesuffix("-value"))
        for found in run(parsed.num_ranks, figures, str(folder), parsed, "none", make, BUDGET):
            check(found)
