"""Training on rows with images."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.eyes import (
    SEEN,
    base64_of,
    encoded,
    picture,
    save_seeing,
    user,
)
from tests.helpers.program import on_ranks, read_rows, write_recipe, write_rows

REWARD = """
def of_characters(prompts, completions, **columns):
    assert "images" not in columns
    return [len(set(text[0]["content"] if isinstance(text, list) else text)) / 8 for text in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def rl_rows(folder: Path) -> Path:
    """Prompts with an image, with two, and with none."""
    (folder / "a.png").write_bytes(encoded(picture(17, 9, 1)))
    small = base64_of(encoded(picture(8, 8, 2)))
    rows: list[dict[str, Any]] = [
        {"prompt": user({"type": "image", "image": "a.png"}, "a"), "answer": "a"},
        {
            "prompt": user({"type": "image", "base64": small}, {"type": "image"}),
            "images": ["a.png"],
            "answer": "b",
        },
        {"prompt": f"{SEEN}c", "images": ["a.png"], "answer": "c"},
        {"prompt": "d", "answer": "d"},
    ]
    return write_rows(folder / "rl.jsonl", rows)


def trained(
    folder: Path, model: Path, data: Path, layout: str, **sections: Any
) -> list[dict[str, Any]]:
    """The metrics of two steps on a layout."""
    folder.mkdir()
    (folder / "variety.py").write_text(REWARD)
    sections = {
        "rollout": {"backend": "transformers", "temperature": 1.5},
        "trainer": {"steps": 2},
        **sections,
    }
    recipe = write_recipe(
        folder / "r.yaml", model, data, reward={"import": "variety:of_characters"}, **sections
    )
    world = {"dp=1": 1, "cp=2,dp=2": 4, "cp=2": 2, "dp=2": 2}[layout]
    ended = on_ranks(world, "train", recipe, "--layout", layout)
    assert {each.code for each in ended} == {0}, ended
    return read_rows(folder / "run/metrics.jsonl")
