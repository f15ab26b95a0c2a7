"""`train` and `score` on mixtures of experts: the curves of one rank, on experts cut over two; replay along the way."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from examples.quickstart.scratch import character_tokenizer
from tests.golden.job import MODEL, rl, sft, write_inputs
from tests.helpers.checkpoints import assert_same_tensors, read_routes, tensors_of
from tests.helpers.program import here, on_ranks, refused_on
from tests.helpers.tolerances import MODEL_FP32
from tests.helpers.training_layouts import assert_same_rl, assert_same_sft, played_on

WHOLE = "tp=2,pp=2,dp=2"  # with ep=2: eight ranks
LATENT: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
SPARSE: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {**SPARSE, "head_dim": 12}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {**SPARSE, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "deepseek_v2": (DeepseekV2Config, LATENT),
    "deepseek_v3": (DeepseekV3Config, {**LATENT, "n_group": 2, "topk_group": 1}),
}
STEADY: Mapping[str, Any] = {
    "rollout": {"router_replay": "rollout", "mismatch_metrics": True},
    "model": {"moe": {"aux_loss_coef": 0.01, "bias_update_rate": 0.001}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_experts(tmp_path_factory.mktemp("training") / name, name) for name in FAMILIES
    }


def write_experts(folder: Path, family: str) -> Path:
    """The inputs of the other recipes with a mixture of experts in place of their model."""
    write_inputs(folder)
    tokenizer, (kind, options) = character_tokenizer(), FAMILIES[family]
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**{**shape, **options}))
    model.save_pretrained(folder / MODEL)
    return folder


def recipe(inputs: Path, run_dir: Path, name: str) -> dict[str, Any]:
    if name == "sft":
        return sft(inputs, run_dir, model={"path": str(inputs / MODEL), **STEADY["model"]})
    reward = {"import": "digit_rewards:share_of_digits", "workers": 1}
    given = rl(
        inputs, run_dir, name, reward=reward, rollout=STEADY["rollout"], model=STEADY["model"]
    )
    return {**given, "algorithm": {**given["algorithm"], "epochs": 2}}


def check(inputs: Path, run_dir: Path, name: str, layout: str, ep: int) -> None:
    alone = played_on("", recipe(inputs, run_dir / "one", name))
    cut = played_on(layout, {**recipe(inputs, run_dir / "cut", name), "layout": {"ep": ep}})
    (assert_same_sft if name == "sft" else assert_same_rl)(cut, alone)
    assert cut.rows[-1]["expert_load_max"] >= 1.0 >= cut.rows[-1]["expert_load_min"]
    if name == "sft":
        return
    row = cut.rows[-1]
    assert (
        row["replayed_mismatch_mean"] <= row["mismatch_p99"] + MODEL_FP32
        and 0 <= row["route_agreement"] <= 1
    )
    lines = [
        json.loads(line)
        for line in (run_dir / "cut" / "rollouts" / "step_000003.jsonl").read_text().splitlines()
    ]
    routes = read_routes(run_dir / "cut" / "rollouts" / "step_000003.routing.safetensors")
    assert len(routes) == len(lines)
    for line, trace in zip(lines, routes, strict=True):
        assert int(trace.valid.sum()) == len(trace) - 1 >= len(line["token_ids"])


@pytest.mark.parametrize(
    ("family", "name"),
    [("deepseek_v3", "grpo"), pytest.param("qwen2_moe", "sft", marks=pytest.mark.soak)],
)
def test_experts_over_two_ranks(
    inputs: dict[str, Path], family: str, name: str, tmp_path: Path
) -> None:
    check(inputs[family], tmp_path, name, "dp=2", 2)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sft", "grpo", "ppo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_eight_ranks(
    inputs: dict[str, Path], family: str, name: str, tmp_path: Path
) -> None:
    check(inputs[family], tmp_path, name, WHOLE, 2)


def scored(inputs: Path, out: Path, *layout: str) -> list[dict[str, Any]]:
    rows = inputs / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"input_ids": [1 + i % 9 for i in range(n)]}) + "\n" for n in (5, 12, 2, 9)
        )
    )
    words = [
        "score",
        "--model",
        inputs / MODEL,
        "--data",
        rows,
        "--out",
        out,
        "--device",
        "cpu",
        *layout,
    ]
    ended = on_ranks(8, *words) if layout else [here(*words)]
    assert {each.code for each in ended} == {0}, ended
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_score_over_eight_ranks(inputs: dict[str, Path], family: str, tmp_path: Path) -> None:
    alone = scored(inputs[family], tmp_path / "one.jsonl")
    for a, b in zip(
        scored(inputs[family], tmp_path / "cut.jsonl", "--layout", f"{WHOLE},ep=2"),
        alone,
        strict=True,
    ):
        for key in ("log_probs", "entropy"):
            assert a[key] == pytest.approx(b[key], abs=MODEL_FP32)


def test_generate_and_convert_over_two_ranks(inputs: dict[str, Path], tmp_path: Path) -> None:
    model, prompts = inputs["deepseek_v3"] / MODEL, tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("3+4=", "1+", "9")))
    words = [
        "generate",
        "--model",
        model,
        "--data",
        prompts,
        "--device",
        "cpu",
        "--samples",
        "3",
        "--max-new-tokens",
        "5",
    ]
    assert here(*words, "--out", tmp_path / "one").code == 0
    assert {
        each.code
        for each in on_ranks(2, *words, "--out", tmp_path / "two", "--layout", "dp=2,ep=2")
    } == {0}
    one, two = (
        [json.loads(x) for x in (tmp_path / n).read_text().splitlines()] for n in ("one", "two")
    )
    assert len(one) == 9 and [row["token_ids"] for row in one] == [row["token_ids"] for row in two]
    cut = [
        "convert",
        model,
        tmp_path / "cut",
        "--to",
        "sharded",
        "--device",
        "cpu",
        "--layout",
        "dp=2,ep=2",
    ]
    assert {each.code for each in on_ranks(2, *cut)} == {0}
    assert (
        here("convert", tmp_path / "cut", tmp_path / "whole", "--to", "hf", "--device", "cpu").code
        == 0
    )
    assert_same_tensors(tensors_of(tmp_path / "whole"), tensors_of(model))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"router_replay": "trainer"}},
            "rollout.router_replay: .* is a qwen2 model without experts",
        ),
        (
            {"model": {"moe": {"z_loss_coef": 0.1}}},
            "model.moe.z_loss_coef: .* is a qwen2 model without experts",
        ),
    ],
)
def test_keys_of_experts_are_refused_without_any(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = rl(write_inputs(tmp_path / "inputs"), tmp_path / "run", **sections)
    recipe = tmp_path / "inputs" / "recipe.yaml"  # where its reward is
    recipe.write_text(yaml.safe_dump(given))
    assert re.search(message, refused_on(1, "train", recipe, "--device", "cpu"))
