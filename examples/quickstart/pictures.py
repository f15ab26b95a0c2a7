"""Pictures with answers that a program can check, for image_grpo.yaml: how many squares are there? Needs pillow."""

import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from examples.quickstart.tasks import EVAL_SEED, Row

CELLS, CELL = 4, 28  # a grid of 4 x 4, each cell one token of Qwen2.5-VL
COLORS = ("red", "green", "blue", "orange", "purple")
QUESTION = "How many squares are in the picture? Answer with the number only."


def squares(folder: Path, seed: int, num_train: int, num_eval: int) -> tuple[list[Row], list[Row]]:
    """(train, held out) RL rows of a picture and the number of squares in it, at least one; files go into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return (
        [_row(folder, f"train_{i}", random.Random(f"{seed}/{i}")) for i in range(num_train)],
        [_row(folder, f"eval_{i}", random.Random(f"{EVAL_SEED}/{i}")) for i in range(num_eval)],
    )


def _row(folder: Path, name: str, draw: random.Random) -> dict[str, Any]:
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    pen = ImageDraw.Draw(image)
    cells = draw.sample(range(CELLS * CELLS), draw.randint(1, 9))
    for cell in cells:
        left, top = cell % CELLS * CELL, cell // CELLS * CELL
        pen.rectangle(
            (left + 4, top + 4, left + CELL - 5, top + CELL - 5), fill=draw.choice(COLORS)
        )
    path = folder / f"{name}.png"
    image.save(path)
    content = [
        {"type": "image", "path": f"{folder.name}/{path.name}"},
        {"type": "text", "text": QUESTION},
    ]
    return {"prompt": [{"role": "user", "content": content}], "answer": str(len(cells))}
