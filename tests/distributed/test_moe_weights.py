"""Experts go from an HF directory through any layout and back, byte for byte, in every form that checkpoints have."""

import shutil
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dovetail.checkpoint.conversion import convert_to_hf, convert_to_sharded
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.factory.engine import from_pretrained, make_mesh, make_model
from dovetail.nn.model import StagedModel
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.checkpoints import assert_same_tensors, digests, tensors_of
from tests.helpers.harness import run
from tests.helpers.parity_configs import moe_configs, save_tiny

DTYPES = {
    "qwen3_moe": torch.bfloat16,
    "qwen2_moe": torch.float32,
    "mixtral": torch.bfloat16,
    "deepseek_v3": torch.float32,
}
LAYOUTS = (Layout(tp=2, dp=2, ep=2), Layout(cp=2, dp=2, ep=4), Layout(pp=2, dp=2))


def write_forms(folder: Path, names: Iterable[str]) -> None:
    """Each model as transformers writes it, experts apart; and stacked, or stacked and turned, as its modules have them."""
    for name in names:
        dtype = DTYPES[name]
        model = save_tiny(moe_configs()[name], folder / name, dtype)
        for form in ("stacked", "turned"):
            path = folder / f"{name}.{form}"
            shutil.copytree(folder / name, path)
            tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
            if form == "turned":
                tensors = {
                    k: x.transpose(1, 2).contiguous() if ".experts." in k else x
                    for k, x in tensors.items()
                }
            save_file(tensors, path / "model.safetensors", {"format": "pt"})


def through_engines(source: Path, out: Path, layout: Layout) -> None:
    """Load every checkpoint into an engine with float32 masters and save it, in the dtype that it came in."""
    for path in sorted(source.iterdir()):
        engine = from_pretrained(path, layout=layout, dtype=torch.bfloat16, device="cpu")
        assert [name for name, _ in engine.weights()] == list(engine.origin.checkpoint_names)
        engine.save_pretrained(out / path.name)


def through_pieces(source: Path, out: Path, layouts: list[Layout]) -> None:
    """Convert every checkpoint to sharded ones of one layout after the other, and the last one to HF."""
    mesh = make_mesh(None, torch.device("cpu"))
    for path in sorted(source.iterdir()):
        last = path
        for step, layout in enumerate(layouts):
            found = Pretrained.open(last)
            reader = open_checkpoint(last, mesh)

            def model_on(
                imagined: Mesh, found: Pretrained = found, reader: object = reader
            ) -> StagedModel:
                return make_model(found, imagined, torch.float32, reader)  # type: ignore[arg-type]

            last = convert_to_sharded(last, out / f"{path.name}.{step}", layout, model_on, mesh)
        convert_to_hf(last, out / path.name, mesh)


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], *(pytest.param(each, marks=pytest.mark.soak) for each in LAYOUTS[1:])],
    ids=str,
)
def test_every_form_comes_back_as_it_was(tmp_path: Path, layout: Layout) -> None:
    write_forms(tmp_path / "in", DTYPES if layout != LAYOUTS[0] else ("mixtral", "deepseek_v3"))
    run(layout.num_ranks, through_engines, tmp_path / "in", tmp_path / "out", layout)
    for source in sorted((tmp_path / "in").iterdir()):
        assert_same_tensors(tensors_of(tmp_path / "out" / source.name), tensors_of(source))
        assert digests(tmp_path / "out" / source.name) == digests(source), source.name


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("mixtral", (LAYOUTS[0], Layout(tp=4))),
        *(pytest.param(n, (*LAYOUTS, Layout(tp=4)), marks=pytest.mark.soak, id=n) for n in DTYPES),
    ],
)
def test_every_form_comes_back_from_pieces(
    name: str, layouts: tuple[Layout, ...], tmp_path: Path
) -> None:
    """Cut for one layout, that cut again for another, and rejoined."""
    write_forms(tmp_path / "in", [name])
    run(4, through_pieces, tmp_path / "in", tmp_path / "out", [*layouts])
    for source in sorted((tmp_path / "in").iterdir()):
        assert_same_tensors(tensors_of(tmp_path / "out" / source.name), tensors_of(source))


EIGHT = (
    *LAYOUTS,
    Layout(),
    Layout(tp=2, ep=1, dp=3),
    Layout(dp=4, ep=2),
    Layout(tp=2, pp=2, dp=2, ep=2),
    Layout(dp=8, ep=8),
)


@pytest.mark.soak
def test_pieces_of_all_ordered_pairs_of_layouts(tmp_path: Path) -> None:
    """One process cuts for all ranks."""
    save_tiny(moe_configs()["qwen2_moe"], tmp_path / "in" / "qwen2_moe", torch.bfloat16)
    for at, (first, second) in enumerate(permutations(EIGHT, 2)):
        run(1, through_pieces, tmp_path / "in", tmp_path / str(at), [first, second])
        assert_same_tensors(
            tensors_of(tmp_path / str(at) / "qwen2_moe"), tensors_of(tmp_path / "in" / "qwen2_moe")
        )
