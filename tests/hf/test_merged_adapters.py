"""A base and an adapter as one source of weights: `dovetail merge` and `--adapter`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.checkpoint.conversion import convert_to_hf
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.errors import CheckpointError
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
from tests.helpers.parity_configs import moe_configs, tiny_model
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
