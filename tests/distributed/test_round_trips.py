"""From an HF directory through an engine to an HF directory: every file the same, byte for byte, for every variant."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.factory.engine import from_pretrained
from dovetail.parallel.layout import Layout
from tests.helpers.checkpoints import assert_same_tensors, digests, tensors_of
from tests.helpers.harness import run
from tests.helpers.matrix import models, name_of
from tests.helpers.parity_configs import save_tiny, tiny_configs, tiny_model

WIDE = ("llama", "llama_tied", "mistral", "qwen2_tied", "qwen3", "qwen3_tied")  # in float32 too
NARROW = [(name, torch.bfloat16) for name in tiny_configs()]
ALL = [*NARROW, *((name, torch.float32) for name in WIDE)]
FEW = [(name, torch.float32) for name in WIDE[1:4:2]] + [
    ("llama_biases", torch.bfloat16),
    ("apertus", torch.bfloat16),
]


def through_engines(source: Path, out: Path, layout: Layout, nudge: bool = False) -> None:
    """Load every checkpoint into an engine with float32 masters and save it, in the dtype that it came in."""
    for path in sorted(source.iterdir()):
        head: Any = "value" if "value" in path.name else "lm"
        engine = from_pretrained(path, layout=layout, dtype=torch.bfloat16, head=head, device="cpu")
        assert [name for name, _ in engine.weights()] == list(engine.origin.checkpoint_names)
        if nudge:
            with torch.no_grad():
                engine.optimizer.shards[-1].local.add_(1e-2)
        engine.save_pretrained(out / path.name)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(tp=2), NARROW),
        (Layout(tp=2, dp=2), FEW),
        pytest.param(Layout(tp=2, dp=2), ALL, marks=pytest.mark.soak),
        pytest.param(Layout(pp=2, cp=2), ALL, marks=pytest.mark.soak),
        pytest.param(Layout(tp=2, pp=2, cp=2), ALL, marks=pytest.mark.soak),
        pytest.param(Layout(tp=8), ALL, marks=pytest.mark.soak),
    ],
    ids=lambda given: str(given) if isinstance(given, Layout) else str(len(given)),
)
def test_every_variant_comes_back_as_it_was(
    tmp_path: Path, layout: Layout, names: list[tuple[str, torch.dtype]]
) -> None:
    for name, dtype in names:
        save_tiny(tiny_configs()[name], tmp_path / "in" / f"{name}.{dtype}", dtype)
    run(layout.num_ranks, through_engines, tmp_path / "in", tmp_path / "out", layout)
    for name, dtype in names:
        source, out = (tmp_path / place / f"{name}.{dtype}" for place in ("in", "out"))
        assert {x.dtype for x in tensors_of(out).values()} == {dtype}
        assert_same_tensors(tensors_of(out), tensors_of(source))
        assert digests(out, weights=False) == digests(source, weights=False), name


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            Layout(tp=2, pp=2), marks=pytest.mark.soak
        ),  # test_weights.py has it with fewer layers
        pytest.param(
            Layout(pp=2, cp=2, virtual_stages=2, schedule="interleaved"), marks=pytest.mark.soak
        ),
        Layout(pp=4, pp_split=(1, 6, 1, 1)),
        pytest.param(Layout(tp=2, pp=2, cp=2), marks=pytest.mark.soak),
        pytest.param(
            Layout(pp=2, tp=2, dp=2, virtual_stages=4, schedule="interleaved"),
            marks=pytest.mark.soak,
        ),
        pytest.param(Layout(pp=8), marks=pytest.mark.soak),
    ],
    ids=name_of,
)
def test_deep_models_come_back_from_a_pipeline(tmp_path: Path, layout: Layout) -> None:
    """Tied, with biases and windows, and critics, whose heads lie in the last stage."""
    for name, *kinds in (("llama", "lm"), ("qwen2_tied", "lm", "value"), ("qwen3_window", "lm")):
        for kind in kinds:
            model = tiny_model(models()[name], values=kind == "value")
            torch.nn.Module.to(model, torch.bfloat16).save_pretrained(
                tmp_path / "in" / f"{name}.{kind}"
            )
    run(layout.num_ranks, through_engines, tmp_path / "in", tmp_path / "out", layout)
    for source in sorted((tmp_path / "in").iterdir()):
        out = tmp_path / "out" / source.name
        assert_same_tensors(tensors_of(out), tensors_of(source))
        if source.name.endswith("lm"):  # a critic's config says besides how many labels it has
            assert digests(out) == digests(source), source.name


def test_a_changed_parameter_is_noticed(tmp_path: Path) -> None:
    """The mutation."""
    save_tiny(tiny_configs()["llama"], tmp_path / "in" / "llama")
    run(2, through_engines, tmp_path / "in", tmp_path / "out", Layout(tp=2), True)
    with pytest.raises(AssertionError, match="lm_head"):
        assert_same_tensors(
            tensors_of(tmp_path / "out" / "llama"), tensors_of(tmp_path / "in" / "llama")
        )
