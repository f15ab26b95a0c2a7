"""A base and an adapter as one source of weights: `dovetail merge` and `--adapter`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.checkpoint.conversion import convert_to_hf
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.errors import CheckpointError, ConfigError
from dovetail.factory.engine import EngineOptions, from_pretrained, make_engine, make_mesh
from dovetail.nn.adapter_options import AdapterOptions, ExpertAdapters
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained
from dovetail.weights.merged import MergedSource
from dovetail.weights.peft import read_options
from tests.helpers.checkpoints import tensors_of
from tests.helpers.harness import run
from tests.helpers.parity_configs import moe_configs, tiny_configs, tiny_model
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.peft_reference import lora_config, write_peft
from tests.helpers.tolerances import worst_error

FLOAT32 = 1e-5


def test_merge_is_that_of_peft(tmp_path: Path) -> None:
    config = lora_config(rank_pattern={"q_proj": 2}, alpha_pattern={"o_proj": 3}, use_rslora=True)
    write_peft("qwen3", tmp_path, config, torch.float32)
    adapter = tmp_path / "adapter"
    convert_to_hf(tmp_path / "model", tmp_path / "out", Mesh.solo(), adapter=adapter)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    found = tensors_of(tmp_path / "out")
    for name, expected in merged.named_parameters():
        error, _ = worst_error({name: found[name]}, {name: expected.detach()})
        assert error <= FLOAT32, name


def scores(folder: Path, mesh: Mesh, *, merges: bool) -> Tensor:
    """Log-probs of the adapted model: merged as it is read, or with the adapter beside the base."""
    added = str(folder / "adapter")
    source = Pretrained.open(folder / "model", adapter=added if merges else None)
    adapter = None
    if not merges:
        adapter = replace(read_options(folder / "adapter"), path=folder / "adapter")
    options = EngineOptions(adapter=adapter)
    engine = make_engine(source, mesh, torch.float32, "lm", options)
    return engine.score(make_batch()).logprob


def both(folder: Path, layout: Layout) -> tuple[Tensor, Tensor]:
    mesh = make_mesh(layout, torch.device("cpu"))
    return scores(folder, mesh, merges=True), scores(folder, mesh, merges=False)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("experts", ["per_expert", "stacked"])
def test_weights_are_merged_as_they_are_read(
    name: str, experts: ExpertAdapters, tmp_path: Path
) -> None:
    tiny_model(moe_configs()[name]).save_pretrained(tmp_path / "model")
    run(1, train_adapter, tmp_path, experts)
    for layout in (Layout(), Layout(tp=2)):
        for merged, beside in run(layout.num_ranks, both, tmp_path, layout):
            assert worst_error({"": merged}, {"": beside})[0] <= FLOAT32


def train_adapter(folder: Path, experts: ExpertAdapters) -> None:
    adapter = AdapterOptions(rank=4, alpha=8, experts=experts)
    updates = OptimSettings(lr=1e-2, clip_norm=None, eps=1e-3)
    options = EngineOptions(optim=updates, tokens_per_batch=80, adapter=adapter)
    engine = from_pretrained(folder / "model", device="cpu", options=options)
    for _ in range(2):
        engine.train_step(make_batch(), objective)
    engine.save_pretrained(folder / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_peft("qwen3", tmp_path, lora_config(), torch.float32)
    tiny_model(moe_configs()["qwen3_moe"]).save_pretrained(tmp_path / "other")
    base = open_checkpoint(tmp_path / "other", Mesh.solo())
    with pytest.raises(CheckpointError, match=r"extra: base_model.*mlp\.down_proj"):
        MergedSource(base, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", "4"),
        ("r", 0),
        ("r", 5),
        ("r", None),
        ("lora_alpha", [16]),
        ("target_modules", ".*_proj"),
        ("target_modules", [1]),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 2.5}),
        ("bias", "all"),
        ("use_dora", True),
    ],
)
def test_an_ill_typed_adapter_is_refused(key: str, value: object, tmp_path: Path) -> None:
    write_peft("qwen3", tmp_path, lora_config(), torch.float32)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    base = open_checkpoint(tmp_path / "model", Mesh.solo())
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "adapter"))):
        MergedSource(base, tmp_path / "adapter").read("model.layers.0.mlp.down_proj.weight")


def test_an_adapter_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    write_peft("qwen3", tmp_path, lora_config(), torch.float32)
    config = tiny_configs()["qwen3"]
    config.intermediate_size *= 2
    tiny_model(config).save_pretrained(tmp_path / "larger")
    base = open_checkpoint(tmp_path / "larger", Mesh.solo())
    merged = MergedSource(base, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="is it an adapter of this model"):
        merged.read("model.layers.0.mlp.down_proj.weight")


def test_an_adapter_needs_a_layer_and_a_rank(tmp_path: Path) -> None:
    tiny_model(tiny_configs()["qwen3"]).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="rank 0"):
        AdapterOptions(rank=0)
    (message,) = run(1, refused, tmp_path / "model")
    assert "no layer of the model is adapted; its targets are query" in message


def refused(folder: Path) -> str:
    adapter = AdapterOptions(targets=("query",))
    with pytest.raises(ConfigError) as error:
        from_pretrained(folder, device="cpu", options=EngineOptions(adapter=adapter))
    return str(error.value)
