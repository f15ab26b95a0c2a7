"""The commands with `--engine transformers`: the same numbers, files and refusals as with ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.families import TEXT
from tests.helpers.parity_configs import tiny_model
from tests.helpers.program import (
    VOCAB,
    here,
    make_model,
    on_ranks,
    read_rows,
    refusal,
    refused_on,
    write_recipe,
    write_rows,
)
from tests.helpers.tokenizers import make_tokenizer
from tests.helpers.tolerances import CURVE_FP32, MODEL_FP32, RL_LOSS_FP32

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "id": "first"},
    {"input_ids": [9]},
    {"prompt": "ab", "completion": "cd"},
    {"input_ids": list(range(3, 40))},
]
PROMPTS = [{"prompt": text, "answer": text} for text in ("a", "bc", "def", "gh")]

REWARD = """
def of_characters(prompts, completions, **columns):
    return [len(set(text)) / 8 for text in completions]
"""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that only transformers knows, with a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "gemma"
    config = TEXT["gemma3"]()
    vars(config).update({"vocab_size": VOCAB, "eos_token_id": 3, "bos_token_id": None})
    tiny_model(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


def test_score_over_ranks_is_that_of_transformers(gemma: Path, tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    flags = ["--engine", "transformers", "--layout", "cp=2,dp=2"]
    assert {
        each.well
        for each in on_ranks(4, "score", "--model", gemma, "--data", data, "--out", out, *flags)
    } == {True}
    peer = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    for given, row in zip(ROWS, read_rows(out), strict=True):
        ids = given.get("input_ids") or make_tokenizer().encode("abcd", add_special_tokens=False)
        with torch.no_grad():
            logp = torch.log_softmax(peer(torch.tensor([ids])).logits[0], -1)
        expected = (
            logp[:-1].gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].tolist()
        )
        entropy = (-(logp.exp() * logp).sum(-1))[:-1].tolist()
        for a, b in zip(row["log_probs"] + row["entropy"], expected + entropy, strict=True):
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


def test_an_unknown_family_is_chosen_automatically(gemma: Path, tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    assert here("score", "--model", gemma, "--data", data, "--out", out).code == 0
    told = refusal(
        here("score", "--model", gemma, "--data", data, "--out", out, "--engine", "native")
    )
    assert "model_type is 'gemma3_text'; known families: apertus, deepseek_v2" in told
    told = refused_on(
        2, "score", "--model", gemma, "--data", data, "--out", tmp_path / "o", "--layout", "tp=2"
    )
    assert "others, and those with engine=transformers, are cut by cp and dp alone" in told


def test_generate_draws_the_same_by_both_engines(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", PROMPTS)
    found = []
    for engine in ("native", "transformers"):
        out = tmp_path / f"{engine}.jsonl"
        flags = ["--engine", engine, "--samples", "2", "--max-new-tokens", "6", "--seed", "4"]
        assert here("generate", "--model", llama, "--data", data, "--out", out, *flags).code == 0
        found.append([row["token_ids"] for row in read_rows(out)])
    assert found[0] == found[1]


def test_a_recipe_gives_the_same_run_by_both_engines(llama: Path, tmp_path: Path) -> None:
    """GRPO with identical ids: CONTRACT's rule for RL curves."""
    data, rows = write_rows(tmp_path / "rl.jsonl", PROMPTS), []
    for engine, world, layout in (("native", 1, "dp=1"), ("transformers", 2, "cp=2")):
        (tmp_path / engine).mkdir()
        (tmp_path / engine / "variety.py").write_text(REWARD)
        recipe = write_recipe(
            tmp_path / engine / "r.yaml",
            llama,
            data,
            model={"engine": engine},
            algorithm={"name": "grpo", "kl_coef": 0.1},
            rollout={"backend": engine, "temperature": 1.5},
            reward={"import": "variety:of_characters"},
            trainer={"steps": 3},
        )
        assert {ended.code for ended in on_ranks(world, "train", recipe, "--layout", layout)} == {0}
        rows.append(read_rows(tmp_path / engine / "run/metrics.jsonl"))
        assert AutoModelForCausalLM.from_pretrained(tmp_path / engine / "run/hf") is not None
    assert rows[0][0]["grad_norm"] > 0
    for ours, theirs in zip(*rows, strict=True):
        assert ours["response_length_mean"] == theirs["response_length_mean"]
        assert ours["reward_mean"] == theirs["reward_mean"]
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= CURVE_FP32 * ours["grad_norm"]
        assert abs(ours["loss"] - theirs["loss"]) <= RL_LOSS_FP32 * (1 + abs(ours["loss"]))
        assert (
            abs(ours["entropy_mean"] - theirs["entropy_mean"]) <= CURVE_FP32 * ours["entropy_mean"]
        )


def test_training_a_family_that_only_transformers_knows(gemma: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rl.jsonl", PROMPTS)
    recipe = write_recipe(
        tmp_path / "r.yaml", gemma, data, algorithm={"name": "ppo"}, reward={"name": "exact_match"}
    )
    assert "set rollout.backend=transformers" in refusal(here("train", recipe))
    ended = on_ranks(2, "train", recipe, "rollout.backend=transformers", "--layout", "cp=2")
    assert {each.code for each in ended} == {0}, ended
    assert len(read_rows(tmp_path / "run/metrics.jsonl")) == 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    assert type(loaded).__name__ == "Gemma3ForCausalLM"


def test_convert_there_and_back(gemma: Path, tmp_path: Path) -> None:
    cut, back = tmp_path / "cut", tmp_path / "back"
    assert {
        each.well
        for each in on_ranks(3, "convert", gemma, cut, "--to", "sharded", "--layout", "dp=3")
    } == {True}
    assert here("convert", cut, back, "--to", "hf").code == 0
    assert (back / "model.safetensors").read_bytes() == (gemma / "model.safetensors").read_bytes()
