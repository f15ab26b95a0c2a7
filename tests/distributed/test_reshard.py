"""Training state of any layout goes on under any other: every logical tensor bit for bit, and the same curve after.

A reference checkpoint is loaded under A, saved by A, loaded under B, and read whole from B. The values of layer i lie in
[i, i + 0.5), so that a strict load of the wrong layers would be seen as well.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.checkpoint.reader import ShardedReader
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.parallel.layout import Layout
from dovetail.weights.hf_directory import EngineName
from dovetail.weights.shards import kept_buffers
from dovetail.weights.stream import gather_whole
from tests.helpers.harness import run
from tests.helpers.matrix import DEPTH, expert_models, models
from tests.helpers.parity_configs import tiny_model
from tests.helpers.resharding import ROLE, save
from tests.helpers.resumed_runs import cut_back, done, inputs as inputs, numbers, recipe_of
from tests.helpers.tolerances import RESHARDED_FP32

__all__ = ["inputs"]  # a fixture

UPDATES = 7
KINDS = ("param", "exp_avg", "exp_avg_sq")
OUTSIDE = 50  # where a tensor belongs to no layer
NATIVE: EngineName = "native"
FOREIGN: EngineName = "transformers"

Cut = tuple[EngineName, str]  # whose layers run, and the layout
CUTS: dict[int, tuple[Cut, ...]] = {
    1: ((NATIVE, ""), (FOREIGN, "")),
    2: (
        (NATIVE, "tp=2"),
        (NATIVE, "pp=2"),
        (NATIVE, "pp=2,virtual_stages=2,schedule=interleaved"),
        (NATIVE, "cp=2"),
        (NATIVE, "dp=2"),
        (FOREIGN, "dp=2"),
    ),
    4: (
        (NATIVE, "tp=4"),
        (NATIVE, "pp=4,pp_split=1-6-1-1"),
        (NATIVE, "dp=4"),
        (NATIVE, "tp=2,dp=2"),
        (NATIVE, "tp=2,pp=2"),
        (FOREIGN, "cp=2,dp=2"),
    ),
    8: (
        (NATIVE, "tp=8"),
        (NATIVE, "tp=2,pp=2,dp=2"),
        (NATIVE, "pp=2,cp=2,dp=2"),
        (NATIVE, "tp=4,pp=2"),
    ),
}
FEW: dict[int, tuple[Cut, ...]] = {1: CUTS[1][:1], 2: (CUTS[2][0], CUTS[2][2], CUTS[2][5])}
EXPERTS: dict[int, tuple[Cut, ...]] = {
    1: CUTS[1],
    2: (
        (NATIVE, "dp=2,ep=2"),
        (NATIVE, "cp=2,ep=2"),
        (NATIVE, "tp=2"),
        (NATIVE, "pp=2,virtual_stages=2,schedule=interleaved"),
        (FOREIGN, "dp=2"),
    ),
    4: (
        (NATIVE, "tp=2,dp=2,ep=2"),
        (NATIVE, "dp=4,ep=4"),
        (NATIVE, "dp=4,ep=2"),
        (NATIVE, "pp=2,dp=2,ep=2"),
        (NATIVE, "tp=2,cp=2"),
    ),
}


def layout_of(text: str) -> Layout:
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        given[key] = (
            value
            if key == "schedule"
            else int(value)
            if "-" not in value
            else tuple(map(int, value.split("-")))
        )
    return Layout(**given)


def engine_of(source: Path, cut: Cut, head: Any) -> Engine:
    options = EngineOptions(engine=cut[0], fresh_head_seed=0)
    return from_pretrained(
        source, layout=layout_of(cut[1]), head=head, device="cpu", options=options
    )


def whole(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Weights as they are trained, and moments, under one name a kind."""
    for kind, export in zip(KINDS, engine.export_training(ROLE), strict=True):
        for name, tensor in gather_whole(export, engine.mesh, list(export.specs)):
            yield f"{kind} {name.split('/', 3)[3]}", tensor


def layer_of(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else OUTSIDE


def write_reference(source: Path, path: Path, head: str) -> dict[str, Tensor]:
    """A checkpoint of one rank with values of our own, and its tensors."""
    engine = engine_of(source, CUTS[1][0], head)
    draw = torch.Generator().manual_seed(3)
    engine.optimizer.resume(UPDATES)
    moments = engine.optimizer.state_tensors()
    for name, param in engine.model.named_parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        for tensor in (local.data, *(moments[kind][name] for kind in KINDS[1:])):
            tensor.copy_(layer_of(name) + torch.rand(tensor.shape, generator=draw) / 2)
    for name, buffer in kept_buffers(engine.model).items():
        buffer.copy_(layer_of(name) + torch.rand(buffer.shape, generator=draw) / 2)
    save(engine, path)
    return {name: tensor.clone() for name, tensor in whole(engine)}


def through(
    source: Path, cuts: Sequence[Cut], head: str, loads: Sequence[Path], saves: Path | None
) -> list[Any]:
    """Load each checkpoint in `loads` under each cut: what differs from the first one; with `saves`, save it there."""
    found: list[Any] = []
    for cut in cuts:
        engine = engine_of(source, cut, head)
        for path in loads:
            with torch.no_grad():
                for param in engine.model.parameters():
                    param.zero_()
            reader = ShardedReader(path)
            engine.load_training(ROLE, reader, (reader.manifest.state or {})["updates"])
            seen = {name: tensor.clone() for name, tensor in whole(engine)}
            steps = {float(state["step"]) for state in engine.optimizer.rule.state.values()} | {
                float(engine.updates)
            }
            found.append((path.name, cut, seen if engine.mesh["world"].rank == 0 else {}, steps))
        if saves is not None:
            save(engine, saves / f"{cut[0]} {cut[1]}")
    return found


def check(found: list[Any], reference: dict[str, Tensor]) -> None:
    for before, cut, seen, steps in found:
        assert steps == {float(UPDATES)}, (before, cut)
        assert seen.keys() == reference.keys(), (before, cut)
        for name, tensor in reference.items():
            assert torch.equal(seen[name], tensor), (before, cut, name)
            assert (seen[name].floor() == layer_of(name)).all(), (before, cut, name)


@pytest.mark.parametrize(
    ("name", "head", "cuts"),
    [
        ("qwen2_tied", "lm", FEW),
        pytest.param("llama", "lm", CUTS, marks=pytest.mark.soak),
        pytest.param("qwen2_tied", "lm", CUTS, marks=pytest.mark.soak),
        pytest.param("qwen3_window", "value", CUTS, marks=pytest.mark.soak),
        pytest.param("qwen2_moe", "lm", EXPERTS, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", "lm", EXPERTS, marks=pytest.mark.soak),
    ],
)
def test_every_layout_goes_on_from_every_other(
    name: str, head: str, cuts: dict[int, tuple[Cut, ...]], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    depth = 5 if cuts is FEW else DEPTH
    tiny_model((models(depth) | expert_models(depth))[name]).save_pretrained(source)
    (tmp_path / "saved").mkdir()
    (reference,) = run(1, write_reference, source, tmp_path / "reference", head)
    weights, *moments = (
        {key.partition(" ")[2] for key in reference if key.startswith(f"{kind} ")} for kind in KINDS
    )
    assert all(
        weights - names == {x for x in weights if x.endswith("correction_bias")}
        for names in moments
    )
    for world, some in cuts.items():
        check(
            run(
                world,
                through,
                source,
                some,
                head,
                [tmp_path / "reference"],
                tmp_path / "saved",
                timeout=600,
            )[0],
            reference,
        )
    saved = sorted((tmp_path / "saved").iterdir())
    assert len(saved) == sum(map(len, cuts.values()))
    for world, some in cuts.items():
        for cut in some:
            check(run(world, through, source, [cut], head, saved, None, timeout=600)[0], reference)


def test_a_wrong_layer_is_noticed(tmp_path: Path) -> None:
    """The mutation: two layers of one shape change places."""
    source = tmp_path / "source"
    tiny_model(models()["llama"]).save_pretrained(source)
    (reference,) = run(1, write_reference, source, tmp_path / "reference", "lm")
    swapped = {
        key.replace("layers.0.", "layers.9.").replace("layers.1.", "layers.0."): x
        for key, x in reference.items()
    }
    swapped = {key.replace("layers.9.", "layers.1."): x for key, x in swapped.items()}
    found = run(1, through, source, CUTS[1][:1], "lm", [tmp_path / "reference"], None)[0]
    check(found, reference)
    with pytest.raises(AssertionError, match="layers"):
        check(found, swapped)


@pytest.mark.parametrize(
    ("before", "after", "world"),
    [
        ("", "tp=2", 2),
        pytest.param("tp=2,dp=2", "pp=2", 2, marks=pytest.mark.soak),
        pytest.param("pp=2", "cp=2,dp=2", 4, marks=pytest.mark.soak),
        pytest.param("dp=4", "", 1, marks=pytest.mark.soak),
    ],
)
def test_the_curve_goes_on_under_another_layout(
    before: str, after: str, world: int, inputs: Path, tmp_path: Path
) -> None:
    given = recipe_of(inputs, tmp_path / "straight", "sft", before, trainer={"steps": 8})
    degrees = given["layout"].values()
    straight = done(given, max(1, torch.Size(degrees).numel()))
    again = cut_back(straight, tmp_path / "again", 4, given)
    again["layout"] = recipe_of(inputs, tmp_path, "sft", after)["layout"]
    resumed = done(again, world)
    for row, expected in zip(numbers(resumed), numbers(straight), strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert row[key] == pytest.approx(expected[key], rel=RESHARDED_FP32), (row["step"], key)
    assert numbers(resumed)[:4] == numbers(straight)[:4]
