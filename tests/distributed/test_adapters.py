"""Low-rank adapters: PEFT's numbers on one rank, and one rank's on every layout."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.factory.engine import EngineOptions, SamplingEngine, from_pretrained
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.nn.adapter_options import AdapterOptions, ExpertAdapters
from dovetail.nn.adapters import adapters_off
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.weights.hf_directory import EngineName
from dovetail.weights.peft import from_stacked, read_options, stacked_name
from tests.helpers.harness import run
from tests.helpers.parity_configs import moe_configs, tiny_configs, tiny_model
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.peft_reference import PEFT_PREFIX, TARGETS, lora_config, write_peft
from tests.helpers.probe import PROBE, gradients, parameters
from tests.helpers.tolerances import worst_error

UPDATES = OptimSettings(lr=1e-2, clip_norm=None, eps=1e-3)
FLOAT32 = 1e-5
EXACT = 1e-12
FIRST = ("apertus", "llama_biases", "qwen2_tied", "qwen3")
DENSE = (*FIRST, *(name for name in tiny_configs() if name not in FIRST))
STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ATTENTION = (*TARGETS[:4], *LATENTS)
LAYOUTS = (
    Layout(tp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(pp=2, schedule="zero_bubble"),
    Layout(tp=4),  # ranks that share key and value heads
    Layout(tp=2, pp=2),
)


EXPERT_LAYOUTS = (Layout(tp=2), Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=2))


def engine_of(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    engine: EngineName = "auto",
    optim: OptimSettings = PROBE,
) -> SamplingEngine:
    adapter = replace(read_options(folder / "adapter"), path=folder / "adapter")
    options = EngineOptions(
        optim=optim, tokens_per_batch=80, adapter=adapter, recompute=recompute, engine=engine
    )
    return from_pretrained(
        folder / "model", layout=layout, dtype=dtype, device="cpu", options=options
    )


def step(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    engine: EngineName = "auto",
) -> dict[str, Tensor]:
    """Log-probs, entropies, the loss, and the gradients of A and B."""
    adapted = engine_of(folder, layout, dtype, recompute, engine)
    batch = make_batch(dtype)
    stats = adapted.score(batch)
    report = adapted.train_step(batch, objective)
    found = {**stats._asdict(), "loss": torch.tensor([report.loss], dtype=dtype)}
    return found | gradients(adapted)[0]


def in_our_form(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's gradients under our names and shapes."""
    ours = {}
    for name, tensor in found.items():
        if tensor.dim() < 3:
            ours[name] = expected[name]
            continue
        stored = stacked_name(name).removeprefix(PEFT_PREFIX).removesuffix(".weight")
        ours[name] = from_stacked(name, expected[stored], len(tensor))
    return ours


def cases(names: Sequence[str]) -> list[object]:
    """The first four of `names`, the others in `make soak`."""
    later = [pytest.param(name, marks=pytest.mark.soak) for name in names[4:]]
    return [*names[:4], *later]


@pytest.mark.parametrize("name", cases(DENSE))
def test_one_rank_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    expected = write_peft(name, tmp_path, lora_config(), torch.float32)
    (found,) = run(1, step, tmp_path, Layout(), torch.float32)
    assert found.keys() == expected.keys()
    error, where = worst_error(found, expected)
    assert error <= FLOAT32, where


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3"]
)
def test_experts_compute_what_peft_does(name: str, tmp_path: Path) -> None:
    # PEFT 0.21 takes gate_proj, up_proj and down_proj of these families for their experts'.
    config = lora_config(target_modules=[*ATTENTION], target_parameters=[*STACKED])
    expected = write_peft(name, tmp_path, config, torch.float32)
    (found,) = run(1, step, tmp_path, Layout(), torch.float32)
    error, where = worst_error(found, in_our_form(expected, found))
    assert error <= FLOAT32, where


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_every_layout_of_experts_is_one_rank(layout: Layout, tmp_path: Path) -> None:
    config = lora_config(target_parameters=[*STACKED])
    write_peft("qwen3_moe", tmp_path, config, torch.float64)
    (expected,) = run(1, step, tmp_path, Layout(), torch.float64)
    for found in run(layout.num_ranks, step, tmp_path, layout, torch.float64, "full"):
        error, where = worst_error(found, expected)
        assert error <= EXACT, where


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_is_one_rank(layout: Layout, tmp_path: Path) -> None:
    write_peft("qwen3", tmp_path, lora_config(), torch.float64)
    (expected,) = run(1, step, tmp_path, Layout(), torch.float64)
    for found in run(layout.num_ranks, step, tmp_path, layout, torch.float64, "full"):
        error, where = worst_error(found, expected)
        assert error <= EXACT, where


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "mistral", "qwen2_window", "apertus"])
def test_transformers_engine_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    expected = write_peft(name, tmp_path, lora_config(), torch.float32)
    for world in (1, 2):
        layout = Layout(dp=world)
        for found in run(world, step, tmp_path, layout, torch.float32, "full", "transformers"):
            error, where = worst_error(found, expected)
            assert error <= FLOAT32, where


def files(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Save the adapter and the merged model; the reference without the adapter."""
    engine = engine_of(folder, layout, torch.float32)
    engine.save_pretrained(folder / "saved")
    merged = dict(engine.weights())
    with adapters_off(engine.model):
        base = engine.score(make_batch()).logprob
    return {"base": base, **merged}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_files_are_those_of_peft(layout: Layout, tmp_path: Path) -> None:
    config = lora_config(rank_pattern={"q_proj": 2}, alpha_pattern={"o_proj": 3}, use_rslora=True)
    write_peft("qwen3", tmp_path, config, torch.float32)
    found = run(layout.num_ranks, files, tmp_path, layout)[0]
    (base,) = run(1, base_score, tmp_path / "model")
    assert worst_error({"": found.pop("base")}, {"": base})[0] <= FLOAT32
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    after = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = PeftModel.from_pretrained(base, tmp_path / "saved").merge_and_unload()
    expected = dict(merged.named_parameters())
    for name in expected:
        assert worst_error({name: found[name]}, {name: expected[name].detach()})[0] <= FLOAT32


def resumed(folder: Path, first: Layout | None, second: Layout) -> dict[str, Tensor]:
    """Two steps; with `first`, the second one after a checkpoint of that layout."""
    batch = make_batch(torch.float64)
    engine = engine_of(folder, second, torch.float64, optim=UPDATES)
    if first is None:
        engine.train_step(batch, objective)
        engine.save_state(folder / f"state {second}")
    else:
        engine.load_state(folder / f"state {first}")
    engine.train_step(batch, objective)
    return parameters(engine)[0]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_training_state_moves_between_layouts(name: str, tmp_path: Path) -> None:
    parameters_of = [*STACKED] if name == "qwen3_moe" else None
    write_peft(name, tmp_path, lora_config(target_parameters=parameters_of), torch.float64)
    layouts = (Layout(), Layout(tp=2), Layout(dp=2))
    whole = {
        layout: run(layout.num_ranks, resumed, tmp_path, None, layout)[0] for layout in layouts
    }
    for first, second in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        found = run(second.num_ranks, resumed, tmp_path, first, second)[0]
        error, where = worst_error(found, whole[Layout()])
        assert error <= EXACT, where
    saved = load_file(next((tmp_path / "state tp=1").rglob("*.safetensors")))
    assert all("lora_" in name for name in saved)


def trained(folder: Path, layout: Layout, experts: ExpertAdapters) -> dict[str, Tensor]:
    """The merged weights of an adapter after two steps, and the log-probs of the adapted model."""
    adapter = AdapterOptions(rank=4, alpha=8, experts=experts, rslora=True)
    options = EngineOptions(optim=UPDATES, tokens_per_batch=80, adapter=adapter)
    engine = from_pretrained(folder / "model", layout=layout, device="cpu", options=options)
    batch = make_batch()
    for _ in range(2):
        engine.train_step(batch, objective)
    engine.save_pretrained(folder / "adapter")
    return {**dict(engine.weights()), "logprob": engine.score(batch).logprob}


def adapted_score(folder: Path, layout: Layout) -> Tensor:
    return engine_of(folder, layout, torch.float32).score(make_batch()).logprob


@pytest.mark.parametrize("experts", ["per_expert", "stacked"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2, ep=2)], ids=str)
def test_merged_and_read_again_experts_are_the_trained_ones(
    layout: Layout, experts: ExpertAdapters, tmp_path: Path
) -> None:
    tiny_model(moe_configs()["qwen3_moe"]).save_pretrained(tmp_path / "model")
    found = run(layout.num_ranks, trained, tmp_path, layout, experts)[0]
    expected = found.pop("logprob")
    shutil.copytree(tmp_path / "model", tmp_path / "merged")
    save_file(found, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    (scored,) = run(1, base_score, tmp_path / "merged")
    assert worst_error({"": scored}, {"": expected})[0] <= FLOAT32
    for again in run(2, adapted_score, tmp_path, Layout(tp=2)):
        assert worst_error({"": again}, {"": expected})[0] <= FLOAT32
    (base,) = run(1, base_score, tmp_path / "model")
    assert worst_error({"": base}, {"": expected})[0] > 100 * FLOAT32


def base_score(folder: Path) -> Tensor:
    return from_pretrained(folder, device="cpu").score(make_batch()).logprob
