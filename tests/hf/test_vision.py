"""Vision-language models in the transformers engine equal plain transformers, and every rank does its share of the looking."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.hf.transformers_model import TransformersModel
from dovetail.hf.vision import balance_images
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.parallel.layout import Layout
from tests.helpers.checkpoints import assert_same_tensors, tensors_of
from tests.helpers.families import VISION
from tests.helpers.harness import run
from tests.helpers.hf_parity import check, figures
from tests.helpers.parity_reference import objective, read_reference
from tests.helpers.probe import PROBE, gradients
from tests.helpers.program import here, on_ranks
from tests.helpers.sights import (
    CLIP,
    SMALL,
    TALL,
    TEXT,
    WIDE,
    alone,
    logits_of,
    sights,
    tiny_sighted,
    write_sights,
)
from tests.helpers.tolerances import HALF_SHARE, MODEL_FP32, max_abs

BUDGET = 80
TIGHT = 16  # of tokens: a sequence of LONELY each
LONELY = ((9,), (1, SMALL, 4), (10,), (11,), (8,), (1, SMALL, 3))  # more micro-batches than images
PICTURES = ((1, SMALL, 2), (TALL, 1), (2, WIDE), (CLIP, 1), (1, SMALL, SMALL), (3, TALL))

CHUNKS = {"gather": "qwen3_vl", "product": "kimi_k25"}
RECOMPUTED, TURNED = ("qwen3_vl", "glm4v"), "qwen3_vl_moe"


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family as a language model; one as a critic."""
    made = {name: write_sights(name, tmp_path_factory.mktemp(name)) for name in VISION}
    critic = tmp_path_factory.mktemp("critic")
    return {**made, "qwen3_vl-value": write_sights("qwen3_vl", critic, values=True)}


def compare(
    seen: dict[str, Path],
    name: str,
    layout: Layout,
    recompute: Recompute = "none",
    budget: int = BUDGET,
) -> None:
    make = partial(sights, name.removesuffix("-value"))
    for found in run(layout.num_ranks, figures, str(seen[name]), layout, recompute, make, budget):
        check(found)


NOT_BELOW = (
    "qwen2_vl",
    "qwen2_5_vl",
    "glm4v_moe",
    "qwen3_vl-value",
)  # the others are compared over cp by tests below


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("cp=2", NOT_BELOW),
        *(
            pytest.param(name, (*VISION, NOT_BELOW[-1]), marks=pytest.mark.soak, id=name)
            for name in ("dp=1", "dp=2", "cp=2", "cp=2,dp=2", "cp=4", "cp=8")
        ),
    ],
)
def test_every_family_equals_transformers(
    seen: dict[str, Path], layout: str, names: tuple[str, ...]
) -> None:
    for name in names:
        compare(seen, name, Layout.parse(layout))


def test_every_family_is_compared_over_cp() -> None:
    assert {*NOT_BELOW, *CHUNKS.values(), *RECOMPUTED, TURNED} == {*VISION, NOT_BELOW[-1]}


@pytest.mark.parametrize("mode", CHUNKS)
def test_a_rank_with_two_chunks_of_the_tokens(seen: dict[str, Path], mode: str) -> None:
    compare(seen, CHUNKS[mode], Layout(cp=4, cp_mode=mode))


@pytest.mark.parametrize("recompute", [pytest.param("full", marks=pytest.mark.soak), "selective"])
def test_recomputing_changes_nothing(seen: dict[str, Path], recompute: Recompute) -> None:
    for name in RECOMPUTED:
        compare(seen, name, Layout(cp=2), recompute)


def engine_of(folder: Path, layout: Layout | None = None, budget: int | None = None) -> Engine:
    options = EngineOptions(optim=PROBE, tokens_per_batch=budget)
    return from_pretrained(folder / "model", layout=layout, device="cpu", options=options)


def looks(folder: Path, layout: Layout, batch: PackedBatch, budget: int = BUDGET) -> list[int]:
    """How many patches this rank's tower is given in each of its calls."""
    engine = engine_of(folder, layout, budget)
    assert isinstance(engine.model, TransformersModel)
    tower = engine.model.model.get_submodule("visual")
    found: list[int] = []

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(len(args[0]))

    tower.register_forward_pre_hook(count)
    engine.train_step(batch, objective)
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(dp=4), marks=pytest.mark.soak), Layout(cp=2, dp=2)], ids=str
)
def test_every_rank_looks_once_a_micro_batch(seen: dict[str, Path], layout: Layout) -> None:
    """Whatever there is to see: so FSDP2's collectives are equally many and in the same order everywhere."""
    calls = run(4, looks, seen["qwen2_5_vl"], layout, sights("qwen2_5_vl", LONELY), TIGHT)
    assert len({len(found) for found in calls}) == 1
    assert len(calls[0]) > 1
    seen_by_all = sorted(patches for found in calls for patches in found)
    assert set(seen_by_all) == {4, 16}, "placeholders are the smallest image there is"
    assert seen_by_all.count(16) == 2


def test_the_tower_of_a_rank_sees_its_share(seen: dict[str, Path]) -> None:
    batch = sights("qwen2_5_vl", PICTURES)
    (alone,) = run(1, looks, seen["qwen2_5_vl"], Layout(), batch)
    shared = run(4, looks, seen["qwen2_5_vl"], Layout(cp=4), batch)
    assert sum(alone) == 16 + 32 + 32 + 32 + 32 + 32
    assert max(map(sum, shared)) <= sum(alone) / 2, "few images, so no better than that"
    assert sum(map(sum, shared)) <= sum(alone) + 4 * sum(map(len, shared)), "and none is seen twice"


def test_dealing_is_even_and_loses_nothing() -> None:
    patches = [5, 1, 9, 2, 2, 7, 3, 3]
    owners = balance_images(patches, 3)
    loads = [
        sum(n for n, owner in zip(patches, owners, strict=True) if owner == rank)
        for rank in range(3)
    ]
    assert max(loads) - min(loads) <= 2
    assert balance_images([], 2) == []


def blind(folder: Path, layout: Layout) -> float:
    """The largest gradient of the tower after a step on text; every parameter has one."""
    engine = engine_of(folder, layout)
    engine.train_step(sights("qwen3_vl", TEXT), objective)
    found, _ = gradients(engine)
    assert max_abs(found["model.language_model.layers.0.mlp.up_proj.weight"]) > 0
    return max(max_abs(grad) for name, grad in found.items() if ".visual." in name)


def test_a_placeholder_leaves_no_gradient(seen: dict[str, Path]) -> None:
    assert run(2, blind, seen["qwen3_vl"], Layout(cp=2)) == [0.0, 0.0]


def mixed_up(folder: Path) -> list[float]:
    """How far scores move when only the tower does."""
    outputs, _ = read_reference(folder)
    engine = engine_of(folder)
    found = []
    for part in (
        "visual.patch_embed.proj.weight",
        "visual.deepstack_merger_list.1.linear_fc2.weight",
    ):
        with torch.no_grad():
            for shard in engine.optimizer.shards:
                if shard.name.endswith(part):
                    shard.local.mul_(1.01)
        found.append(max_abs(engine.score(sights("qwen3_vl")).logprob - outputs["logprob"]))
    return found


def test_a_mutation_of_the_tower_is_noticed(seen: dict[str, Path]) -> None:
    (found,) = run(1, mixed_up, seen["qwen3_vl"])
    assert min(found) > 100 * MODEL_FP32


def save(folder: Path, target: Path, layout: Layout) -> None:
    engine_of(folder, layout).save_pretrained(target)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        "qwen3_vl_moe",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("glm4v_moe", "kimi_k25")),
    ],
)
def test_a_checkpoint_comes_back_as_it_was(
    seen: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """Under the names that it lists, on two ranks and through the sharded format; transformers loads it."""
    run(2, save, seen[name], tmp_path / "saved", Layout(cp=2))
    assert_same_tensors(tensors_of(tmp_path / "saved"), tensors_of(seen[name] / "model"))
    ended = on_ranks(
        2, "convert", seen[name] / "model", tmp_path / "cut", "--to", "sharded", "--layout", "dp=2"
    )
    assert {each.code for each in ended} == {0}, ended
    assert here("convert", tmp_path / "cut", tmp_path / "back", "--to", "hf").code == 0
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(seen[name] / "model"))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    expected = tiny_sighted(name).state_dict()
    assert all(torch.equal(x, expected[key]) for key, x in loaded.state_dict().items())


def test_experts_that_a_checkpoint_has_turned(seen: dict[str, Path], tmp_path: Path) -> None:
    """As the hub's Qwen3-VL-MoE has them: [E, in, out]."""
    turned = tmp_path / "model"
    shutil.copytree(seen["qwen3_vl_moe"] / "model", turned)
    shutil.copy(seen["qwen3_vl_moe"] / "expected.safetensors", tmp_path)
    tensors = {
        name: x.transpose(1, 2).contiguous() if ".experts." in name else x
        for name, x in tensors_of(turned).items()
    }
    save_file(tensors, turned / "model.safetensors", metadata={"format": "pt"})
    compare({TURNED: tmp_path}, TURNED, Layout(cp=2))
    run(2, save, tmp_path, tmp_path / "saved", Layout(dp=2))
    assert_same_tensors(tensors_of(tmp_path / "saved"), tensors)


def half(folder: Path, layout: Layout, name: str) -> Tensor:
    options = EngineOptions(tokens_per_batch=BUDGET)
    path = folder / "model"
    engine = from_pretrained(
        path, layout=layout, dtype=torch.bfloat16, device="cpu", options=options
    )
    return engine.score(sights(name)).logprob


@pytest.mark.soak
def test_bfloat16_is_as_near_as_that_of_transformers(seen: dict[str, Path]) -> None:
    """Mean distance of log-probs from the float32 reference, over all families."""
    ours, theirs = [], []
    for name in VISION:
        batch = sights(name)
        exact = read_reference(seen[name])[0]["logprob"]
        model = tiny_sighted(name)
        torch.nn.Module.to(model, torch.bfloat16)
        with torch.no_grad():
            logits = torch.cat([logits_of(model, halved(inputs)) for inputs in alone(name)]).to(
                torch.float32
            )
        stats = (logits / batch.fields["temperature"][:, None]).log_softmax(-1)
        theirs.append((stats.gather(-1, batch.targets[:, None])[:, 0] - exact)[batch.mask].abs())
        (found, _) = run(2, half, seen[name], Layout(cp=2), name)
        ours.append((found - exact)[batch.mask].abs())
    mean, other = torch.cat(ours).mean(), torch.cat(theirs).mean()
    assert 0 < mean <= HALF_SHARE * other, (mean, other)


def halved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: x.to(torch.bfloat16) if name.startswith("pixel") else x for name, x in inputs.items()
    }
