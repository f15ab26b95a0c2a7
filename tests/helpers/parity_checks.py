"""A model's numbers on a layout against those of transformers."""

from collections.abc import Collection
from pathlib import Path

from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.parity_bodies import Figures, compare
from tests.helpers.parity_reference import write_reference
from tests.helpers.tolerances import EXACT, GRAD_RATIO_FP32, MODEL_FP32

VALUES = "values of "
PATIENCE = 600.0  # seconds for one layout and all models of it, on a busy machine


class References(dict[str, Path]):
    """Every model, its outputs and gradients, written when it is first asked for; critics under "values of NAME"."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        where = self.folder / name.replace(" ", "_")
        self[name] = write_reference(
            name.removeprefix(VALUES), where, values=name.startswith(VALUES)
        )
        return self[name]


def check(folders: dict[str, Path], layout: str, unharmed: Collection[str] = ()) -> None:
    """Every rank's figures hold, and would not if a weight, a sum or a copy were wrong."""
    parsed = Layout.parse(layout)
    for rank, figures in enumerate(
        run(parsed.num_ranks, compare, folders, parsed, unharmed, timeout=PATIENCE)
    ):
        for name, found in figures.items():
            for what, figure, limit in limits(found):
                assert figure <= limit, f"{name}, rank {rank}: {what} {figure:.2e} > {limit:.0e}"
            for defect, figure in found.mutants.items():
                assert figure > MODEL_FP32, (
                    f"{name}, rank {rank}: nobody notices that {defect} ({figure:.2e})"
                )


def limits(found: Figures) -> list[tuple[str, float, float]]:
    return [
        ("outputs", found.output, MODEL_FP32),
        ("loss", found.loss, MODEL_FP32),
        ("gradient norm", found.norm, MODEL_FP32),
        ("gradients", found.grad, MODEL_FP32),
        ("a gradient's factor", found.ratio, GRAD_RATIO_FP32),
        ("ranks with the same piece", found.stray, EXACT),
        ("names and bytes of the streamed weights", found.streamed, EXACT),
    ]
